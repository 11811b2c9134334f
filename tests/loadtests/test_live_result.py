"""What a live run adds to the numbers, from literal records."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from loadtests import screen
from loadtests.live_result import summarise
from loadtests.record import Record
from loadtests.reuse import ceiling
from loadtests.schedule import Row, Schedule
from loadtests.sustain import Sustained, verdict
from policies.model import ServiceClass
from policies.objectives import Partition

CLASSES = {"interactive": ServiceClass("interactive", ttft_s=2.0, tpot_s=0.1)}
KEPT = verdict([Sustained([0.001] * 4, [0.001] * 4, 0.1, 4, 4)], 2.0)
LATE_GENERATOR = verdict([Sustained([0.3] * 4, [0.001] * 4, 0.1, 4, 4)], 2.0)


def schedule(n: int = 4) -> Schedule:
    return Schedule(tuple(Row(i, float(i), 10, 3, (i,)) for i in range(n)), 8.0, 2.0, 512, CLASSES)


def record(id: int, partition: Partition, ttft_s: float = 0.5, **more: object) -> Record:
    complete = partition in (Partition.GOOD, Partition.SLOW_TTFT)
    made = Record(id, None, 0, "interactive", 10, 3, True, float(id), float(id), partition=partition, complete=complete)
    if complete:
        made.first_s, made.last_s, made.end_s = id + ttft_s, id + ttft_s + 0.2, id + ttft_s + 0.3
        made.completion_tokens, made.content_events = 3, 3
    for name, value in more.items():
        setattr(made, name, value)
    return made


FOUR = [
    record(0, Partition.GOOD, replica="r0", served_prompt_tokens=10, cached_tokens=4, attempts=1),
    record(1, Partition.SLOW_TTFT, 3.0, replica="r1", served_prompt_tokens=10, attempts=2),
    record(2, Partition.REJECTED, reason="infeasible", attempts=1),
    record(3, Partition.NOT_DISPATCHED, reason="behind a failed turn", scheduled_s=None, dispatched_s=None),
]


def test_every_request_is_in_the_denominator_and_the_divisor_is_fixed() -> None:
    run = summarise(schedule(), FOUR, KEPT, policy="round_robin", replicas=2)
    assert (run["offered"], run["good"], run["attainment"], run["goodput_rps"]) == (4, 1, 0.25, 0.1)
    assert {name: n for name, n in run["outcomes"].items() if n} == {
        "good": 1, "slow_ttft": 1, "rejected": 1, "not_dispatched": 1,
    }  # fmt: skip
    assert (run["shed"], run["late_complete"], run["error_rate"]) == (1, 1, 0.0)
    assert run["reasons_by_outcome"] == {
        "not_dispatched": {"behind a failed turn": 1},
        "rejected": {"infeasible": 1},
    }
    assert run["view"] == "open loop"


def test_the_table_says_where_every_request_went() -> None:
    run = summarise(schedule(), FOUR, KEPT, policy="round_robin", replicas=2)
    table = screen.run_table([run], "")
    names, values = (list(column.cells) for column in table.columns)
    shown = dict(zip(names, values, strict=True))
    assert shown["good / offered"] == "1 / 4"
    assert shown["shed / late but complete"] == "1 / 1"
    assert shown["unfinished / behind a failed turn"] == "0 / 1"


def test_a_run_whose_generator_fell_behind_has_no_goodput() -> None:
    run = summarise(schedule(), FOUR, LATE_GENERATOR, policy="x")
    assert (run["verdict"], run["goodput_rps"], run["attainment"], run["good"]) == ("invalid", None, None, None)
    assert run["reasons"][0] == "lag p99 300.0 ms is over 20.0 ms: use a quieter machine, or more --workers"


def test_a_replica_that_lagged_voids_the_run_too() -> None:
    run = summarise(schedule(), FOUR, KEPT, policy="x", more_reasons=["replica r0 lagged"])
    assert (run["verdict"], run["reasons"]) == ("invalid", ["replica r0 lagged"])


def test_missing_cached_tokens_are_unknown_not_zero() -> None:
    reuse = summarise(schedule(), FOUR, KEPT, policy="x")["reuse"]
    assert (reuse["achieved"], reuse["prompt_tokens"], reuse["not_reported"]) == (0.4, 10, 1)


def test_reuse_and_its_ceiling_are_of_the_rows_that_were_served() -> None:
    rows = tuple(Row(i, float(i), 20, 3, (1, 2)) for i in range(4))
    plan = Schedule(rows, 8.0, 2.0, 10, CLASSES)
    served = [record(i, Partition.GOOD, served_prompt_tokens=20, cached_tokens=19 * i) for i in range(2)]
    shed = [record(i, Partition.REJECTED, reason="infeasible") for i in (2, 3)]
    reuse = summarise(plan, [*served, *shed], KEPT, policy="x")["reuse"]
    assert (reuse["achieved"], reuse["ceiling"]) == (19 / 40, 19 / 40)  # of all four it would be 57 / 80


def test_retries_are_counted_apart_from_requests() -> None:
    attempts = summarise(schedule(), FOUR, KEPT, policy="x")["attempts"]
    assert (attempts["logical"], attempts["sent"], attempts["amplification"]) == (3, 4, 4 / 3)


def test_a_response_paced_run_counts_what_was_started_and_says_so() -> None:
    records = [FOUR[0], FOUR[1], *(record(i, Partition.NOT_DISPATCHED, counted=False) for i in (2, 3))]
    run = summarise(schedule(), records, KEPT, policy="x", response_paced=True)
    assert (run["offered"], run["good"], run["view"]) == (2, 1, "response-paced")
    assert run["schedule_sha256"] == schedule().sha256


def test_the_reuse_ceiling_counts_leading_blocks_seen_before() -> None:
    rows = [Row(0, 0.0, 20, 1, (1, 2)), Row(1, 1.0, 20, 1, (1, 3)), Row(2, 2.0, 20, 1, (9, 2))]
    assert ceiling(rows, 10) == 10 / 60
    assert ceiling(rows, 10, replicas=3) == 0.0


def test_a_whole_prompt_seen_before_still_computes_its_last_token() -> None:
    rows = [Row(0, 0.0, 20, 1, (1, 2)), Row(1, 1.0, 20, 1, (1, 2))]
    assert ceiling(rows, 10) == 19 / 40


def test_errors_and_refusals_are_told_by_status_and_reason_with_the_first_message() -> None:
    refused = [
        record(i, Partition.ERROR_HTTP, http=403, reason="class_not_allowed", message=f"not yours, {i}") for i in (0, 1)
    ]
    gone = record(2, Partition.ERROR_TRANSPORT, reason="no_response: refused")
    run = summarise(schedule(), [*refused, gone, record(3, Partition.GOOD)], KEPT, policy="x")
    assert run["top_errors"] == [
        {"count": 2, "http": 403, "reason": "class_not_allowed", "message": "not yours, 0"},
        {"count": 1, "http": None, "reason": "no_response", "message": "refused"},
    ]


def test_more_than_a_few_errors_are_shown_and_a_missing_key_is_named() -> None:
    def shown(count: int, complete_rps: float) -> str:
        console = Console(file=StringIO(), width=200)
        told = {"count": count, "http": 401, "reason": "no_key", "message": "[key] missing"}
        screen.print_errors(console, [{"policy": "replay", "top_errors": [told], "complete_rps": complete_rps}])
        written = console.file
        assert isinstance(written, StringIO)
        return written.getvalue()

    assert shown(3, complete_rps=1.0) == ""
    assert shown(1, complete_rps=0.0).startswith("replay: 1 x 401 no_key")
    assert shown(4, complete_rps=1.0).startswith(
        "replay: 4 x 401 no_key: [key] missing (the key of a client is read from the environment"
    )
