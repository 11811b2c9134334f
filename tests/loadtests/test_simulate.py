"""`forebay simulate` from the command line: its files, its refusals, its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadtests import campaign, cli
from loadtests.results import ConservationError
from loadtests.schedule import load as load_schedule

SMALL = [
    "--workload", "chat", "--replicas", "2", "--load", "0.2,0.4", "--window", "20", "--drain", "10", "--seeds", "2",
    "--policy", "round_robin", "--policy", "forebay", "--objective", "ttft=2s+0.25ms/token,tpot=80ms",
]  # fmt: skip


def simulate(*arguments: str) -> Any:
    return CliRunner().invoke(cli.build(["simulate"]), ["simulate", *arguments])


def test_two_executions_leave_equal_runs_and_equal_lines(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    short = [*SMALL, "--window", "6", "--drain", "6"]
    first = simulate(*short, "--out", str(one), "--jobs", "1")
    assert first.exit_code == 0, first.output
    assert simulate(*short, "--out", str(two), "--jobs", "2").exit_code == 0
    held, again = (json.loads((d / "summary.json").read_text()) for d in (one, two))
    assert held["runs"] == again["runs"]
    assert held["comparisons"] == again["comparisons"]
    assert (one / "requests.jsonl").read_bytes() == (two / "requests.jsonl").read_bytes()
    assert all(run["offered"] for run in held["runs"])
    assert "wall_s" in held["provenance"]
    assert not [r for r in held["runs"] if "wall_s" in r]


def test_the_summary_has_the_fields_that_others_read(tmp_path: Path) -> None:
    result = simulate(*SMALL, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    runs = summary["runs"]
    assert [(r["policy"], r["load"], r["seed"]) for r in runs] == [
        (arm, load, seed) for load in (0.2, 0.4) for arm in ("round_robin", "forebay") for seed in (0, 1)
    ]
    for run in runs:
        assert run["verdict"] == "valid"
        assert run["offered"] == sum(run["outcomes"].values()) > 0
        assert run["attainment"] == run["good"] / run["offered"]
        assert run["goodput_rps"] == run["good"] / 30.0
        assert {"p50", "p90", "p99", "n"} <= run["ttft_s"].keys()
        assert {"shed", "late_complete"} <= run.keys()
    lines = [json.loads(x) for x in (tmp_path / "requests.jsonl").read_text().splitlines()]
    counted = [x for x in lines if x["counted"] and x["policy"] == "forebay" and (x["load"], x["seed"]) == (0.4, 1)]
    assert len(counted) == runs[-1]["offered"]
    assert sum(x["partition"] == "good" for x in counted) == runs[-1]["good"]


def test_both_arms_had_the_schedule_that_lies_beside_the_results(tmp_path: Path) -> None:
    simulate(*SMALL, "--out", str(tmp_path))
    runs = json.loads((tmp_path / "summary.json").read_text())["runs"]
    held = load_schedule(tmp_path / "schedules" / "load-0.4-seed-1.jsonl.gz")
    assert {r["schedule_sha256"] for r in runs if (r["load"], r["seed"]) == (0.4, 1)} == {held.sha256}
    assert len({r["schedule_sha256"] for r in runs}) == 4
    assert held.classes["interactive"].tpot_s == 0.08


def trace(tmp_path: Path, rows: int = 100) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": i * 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, i + 1]}) + "\n"
            for i in range(rows)
        )
    )
    return path


def test_a_run_longer_than_the_trace_is_refused_with_the_largest_window(tmp_path: Path) -> None:
    result = simulate(
        "--trace",
        str(trace(tmp_path)),
        "--window",
        "60",
        "--drain",
        "10",
        "--load",
        "0.5,2",
        "--out",
        str(tmp_path / "o"),
    )
    assert result.exit_code == 2
    assert "the largest window that fits is 39 s" in result.output
    assert not (tmp_path / "o").exists()


def test_the_drain_is_the_longest_on_time_request_where_none_is_given(tmp_path: Path) -> None:
    result = simulate(
        "--trace", str(trace(tmp_path)), "--window", "30", "--seeds", "1", "--out", str(tmp_path / "o"), "--objective",
        "ttft=2s+0.25ms/token,tpot=80ms", "--policy", "round_robin", "--replicas", "1",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    run = json.loads((tmp_path / "o" / "summary.json").read_text())["runs"][0]
    assert (run["window_s"], run["drain_s"]) == (30.0, 3.0)  # 2 + 600 x 0.25 ms + 4 x 80 ms = 2.47 s


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--load", "0.5,x"], "--load '0.5,x'"),
        (["--load", "1,1"], "different numbers above 0"),
        (["--policy", "fastest"], "'fastest' is none of"),
        (["--policy", "round_robin+magic"], "unknown suffix 'magic'"),
        (["--profile", "b200"], "profile 'b200' is neither built in"),
        (["--objective", "ttft=soon"], "'soon' is no time"),
        (["--incident", "lost:x@3"], "incident 'lost:x@3'"),
        (["--incident", "slow:3@5x0"], "incident 'slow:3@5x0' (times must be finite, the factor above 0)"),
        (["--incident", "lost:9@3"], "incident lost:9@3: there are replicas 0 to 7 then"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--window", "0"], "--window 0"),
    ],
)
def test_bad_usage_is_named_and_has_status_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = simulate("--workload", "chat", "--window", "5", "--out", str(tmp_path / "o"), *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_run_whose_books_do_not_balance_is_invalid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ConservationError("2 requests are open, the cores hold 1")

    monkeypatch.setattr(campaign, "simulate_arm", broken)
    result = simulate(*SMALL, "--out", str(tmp_path), "--jobs", "1")
    assert result.exit_code == 1
    assert "INVALID: 2 requests are open, the cores hold 1" in result.output


def test_loads_of_adapters_are_counted_against_what_a_perfect_placement_needs(tmp_path: Path) -> None:
    arms = ["--policy", "round_robin", "--policy", "forebay"]
    simulate("--workload", "lora", "--replicas", "4", "--window", "12", "--drain", "5", "--seeds", "1", *arms, "--out",
             str(tmp_path))  # fmt: skip
    scattered, placed = (r["adapters"] for r in json.loads((tmp_path / "summary.json").read_text())["runs"])
    assert 10 <= placed["used"] <= 20
    assert placed["used"] <= placed["loads"] <= 1.2 * placed["used"]
    assert scattered["loads"] > 1.5 * scattered["used"]


def test_the_oracle_and_the_bound_stand_beside_the_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtests.simulate.CACHE", tmp_path / "cache")
    monkeypatch.setattr("loadtests.oracle.PACES", (0.5, 0.9))
    small = [
        "--workload",
        "chat",
        "--replicas",
        "1",
        "--load",
        "0.3",
        "--window",
        "15",
        "--drain",
        "15",
        "--seeds",
        "1",
    ]
    arguments = [*small, "--policy", "round_robin", "--oracle", "--jobs", "1"]
    assert simulate(*arguments, "--out", str(tmp_path / "a")).exit_code == 0
    held = json.loads((tmp_path / "a" / "summary.json").read_text())
    by_arm = {r["policy"]: r for r in held["runs"]}
    assert by_arm["oracle"]["pace"] > 0
    bound = held["bounds"][0]
    assert max(r["good"] for r in held["runs"]) <= bound["good"] + 1e-6
    assert bound["good"] <= by_arm["oracle"]["offered"]
    assert len(list((tmp_path / "cache").glob("*.json"))) == 1
    assert simulate(*arguments, "--out", str(tmp_path / "b")).exit_code == 0  # from the cache
    assert json.loads((tmp_path / "b" / "summary.json").read_text())["runs"] == held["runs"]


def test_shedding_arms_can_be_run_without_the_size_bound_too(tmp_path: Path) -> None:
    result = simulate(*SMALL, "--seeds", "1", "--load", "0.2", "--without-size-bound", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    arms = [r["policy"] for r in json.loads((tmp_path / "summary.json").read_text())["runs"]]
    assert arms == ["round_robin", "forebay", "forebay (no size bound)"]
