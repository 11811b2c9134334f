"""What a run scores: partition, populations, fairness, and the books that must balance."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from loadtests import results
from loadtests.record import Record
from loadtests.results import ConservationError, bucket, fairness, summarise
from loadtests.schedule import Recipe, Row, Schedule
from loadtests.workloads import CLASSES
from policies.objectives import Partition

P = Partition


def plan(count: int, window_s: float = 50.0, drain_s: float = 50.0) -> Schedule:
    rows = tuple(Row(i, float(i), 100 * (i + 1), 5, (i,) * -(-100 * (i + 1) // 512)) for i in range(count))
    return Schedule(rows, window_s, drain_s, 512, CLASSES, Recipe("literal", 3, 1.5))


def record(row: Row, partition: Partition, ttft_s: float | None = 1.0, reason: str = "") -> Record:
    made = Record.of(row, True)
    made.partition, made.reason = partition, reason
    made.scheduled_s = row.at_s
    made.complete = partition is P.GOOD or partition in results.LATE
    if made.complete and row.at_s is not None and ttft_s is not None:
        made.first_s, made.last_s, made.end_s = row.at_s + ttft_s, row.at_s + ttft_s + 0.4, row.at_s + ttft_s + 0.4
        made.completion_tokens, made.cached_tokens = 5, 50
        made.replica = f"r{row.id % 2}"
    return made


def test_every_way_to_fail_stays_in_the_denominator() -> None:
    schedule = plan(len(P))
    entry = summarise(schedule, [record(r, p) for r, p in zip(schedule.rows, P, strict=True)], "x")
    assert entry["offered"] == len(P) == 12
    assert entry["outcomes"] == {p.value: 1 for p in P}
    assert (entry["good"], entry["shed"], entry["late_complete"]) == (1, 1, 4)
    assert entry["attainment"] == pytest.approx(1 / 12)
    assert entry["goodput_rps"] == 0.01  # one in 50 + 50 s
    assert (entry["load"], entry["seed"], entry["policy"], entry["verdict"]) == (1.5, 3, "x", "valid")


def test_rejecting_early_pays_for_all_it_rejected() -> None:
    schedule = plan(10)
    entry = summarise(schedule, [record(r, P.GOOD if r.id < 2 else P.REJECTED) for r in schedule.rows], "x")
    assert (entry["attainment"], entry["shed"]) == (0.2, 8)


def test_percentiles_name_their_populations_and_failures_are_infinite_in_one_of_them() -> None:
    schedule = plan(10)
    rows = [record(r, P.GOOD if r.id < 9 else P.REJECTED, ttft_s=1.0) for r in schedule.rows]
    entry = summarise(schedule, rows, "x")
    assert (entry["ttft_s"]["n"], entry["ttft_s"]["p99"]) == (9, 1.0)
    assert (entry["ttft_offered_s"]["n"], entry["ttft_offered_s"]["max"]) == (10, math.inf)


def test_starving_long_prompts_shows_in_their_bucket() -> None:
    schedule = plan(48)
    entry = summarise(
        schedule, [record(r, P.GOOD if r.prompt_tokens <= 1000 else P.REJECTED) for r in schedule.rows], "x"
    )
    assert entry["by_bucket"]["to_1k"]["attainment"] == 1.0
    assert entry["by_bucket"]["1k_4k"]["attainment"] == 0.0
    assert entry["fairness"]["holds"] is False


@pytest.mark.parametrize(
    ("tokens", "name"),
    [(1, "to_1k"), (1000, "to_1k"), (1001, "1k_4k"), (16_000, "4k_16k"), (64_000, "16k_64k"), (64_001, "above_64k")],
)
def test_buckets(tokens: int, name: str) -> None:
    assert bucket(tokens) == name


def test_fairness_up_to_forty_percent_is_about_shedding_and_above_about_attainment() -> None:
    schedule = plan(40)

    def cohort(shed: tuple[int, ...]) -> list[Record]:
        """`shed[k]` of the ten requests of each quartile."""
        return [record(r, P.REJECTED if r.id % 10 < shed[r.id // 10] else P.GOOD) for r in schedule.rows]

    assert fairness(cohort((0, 0, 2, 2)), 2.0)["holds"]  # 20 % against an average of 10 %
    assert not fairness(cohort((0, 0, 0, 4)), 2.0)["holds"]  # 40 % against 10 %
    assert fairness(cohort((0, 0, 0, 4)), math.inf)["holds"]
    assert fairness(cohort((2, 5, 7, 7)), 2.0)["holds"]  # over 40 % shed: 0.3 of 0.8 is 0.24, the worst has 0.3
    assert not fairness(cohort((0, 3, 7, 10)), 2.0)["holds"]
    hopeless = [
        replace(r, reason="infeasible_even_idle") if r.partition is P.REJECTED else r for r in cohort((0, 0, 0, 4))
    ]
    assert (fairness(hopeless, 2.0)["holds"], fairness(hopeless, 2.0)["even_idle"]) == (True, 4)
    assert fairness(cohort((0, 0, 2, 2)), 2.0)["shed_share"] == [0.0, 0.0, 0.2, 0.2]


def test_a_missing_cached_count_is_unknown_and_not_zero() -> None:
    schedule = plan(2)
    rows = [record(r, P.GOOD) for r in schedule.rows]
    rows[1].cached_tokens = None
    assert summarise(schedule, rows, "x")["cached_share"] == 0.5  # 50 of the first prompt's 100
    rows[0].cached_tokens = None
    assert summarise(schedule, rows, "x")["cached_share"] is None


def test_lost_or_doubled_records_are_an_error() -> None:
    schedule = plan(3)
    rows = [record(r, P.GOOD) for r in schedule.rows]
    with pytest.raises(ConservationError, match="2 records for 3 rows"):
        summarise(schedule, rows[:2], "x")
    with pytest.raises(ConservationError, match="1 records share an id"):
        summarise(schedule, [rows[0], rows[0], rows[1]], "x")


def test_the_timeline_counts_by_scheduled_second_and_completions_by_their_end() -> None:
    schedule = plan(10)
    line = summarise(schedule, [record(r, P.GOOD, ttft_s=6.0) for r in schedule.rows], "x")["timeline"]
    assert line["bin_s"] == 5.0
    assert line["offered"][:3] == [5, 5, 0]
    assert line["completed"][:4] == [0, 4, 5, 1]
    assert len(line["offered"]) == 20


def test_work_is_counted_per_replica_and_its_imbalance_is_one_when_even() -> None:
    schedule = plan(2)
    entry = summarise(schedule, [record(r, P.GOOD) for r in schedule.rows], "x")
    assert entry["per_replica"]["r0"]["prompt_tokens"] == 100
    assert (
        results.imbalance({"a": {"prompt_tokens": 10, "cached": 0}, "b": {"prompt_tokens": 15, "cached": 5}}, 2) == 1.0
    )
    assert results.imbalance({"a": {"prompt_tokens": 10, "cached": 0}}, 4) == 4.0


def test_the_summary_is_json_without_infinities(tmp_path: Path) -> None:
    schedule = plan(2)
    entry = summarise(schedule, [record(r, P.REJECTED) for r in schedule.rows], "x")
    path = results.write(tmp_path / "out", [entry], {"wall_s": 1.0})
    held = json.loads(path.read_text())
    assert held["schema"] == "forebay.results/1"
    assert held["runs"][0]["ttft_offered_s"]["max"] is None
    assert held["runs"][0]["ttft_s"] == {"p50": None, "p90": None, "p95": None, "p99": None, "max": None, "n": 0}
    assert results.read(tmp_path / "out") == held


def test_a_folder_without_a_summary_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"summary\.json: no summary of a run"):
        results.read(tmp_path)


def test_a_line_of_requests_names_its_run() -> None:
    made = replace(record(plan(1).rows[0], P.GOOD), queue_s=math.inf)
    line = json.loads(results.line(made, "forebay", 1.5, 3))
    assert (line["policy"], line["load"], line["seed"], line["id"], line["partition"]) == ("forebay", 1.5, 3, 0, "good")
    assert line["queue_s"] is None


def test_a_folder_without_results_says_what_makes_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"file not found\); run simulate, compare or replay with --out .*none first"):
        results.read(tmp_path / "none")
