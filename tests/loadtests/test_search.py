"""The boundary search on made-up servers whose capacity is known, and recovery from literal records."""

from __future__ import annotations

import pytest

from loadtests.record import Record
from loadtests.recovery import Burst, recovery, settled
from loadtests.schedule import Row, Schedule, ScheduleError
from loadtests.search import Block, Search, Verdict, design_effect, judge
from policies.model import ServiceClass
from policies.objectives import Partition


def server(capacity: float, offered: int = 2_000, settles: bool = True):  # type: ignore[no-untyped-def]
    """Good up to `capacity`, then only what fits."""

    def run(load: float, seed: int) -> Block:
        share = 0.99 if load <= capacity else 0.99 * capacity / load * 0.9
        return Block(round(share * offered), offered, settles)

    return run


@pytest.mark.parametrize("capacity", [0.3, 1.0, 1.7, 9.0])
def test_a_known_capacity_is_found_to_five_percent_and_confirmed(capacity: float) -> None:
    found = Search(server(capacity), target=0.95, seeds=(0, 1), fresh=(10, 11)).boundary(1.0)
    assert found.load is not None
    assert found.above is not None
    assert found.load <= capacity < found.above
    assert found.above / found.load <= 1.05
    assert (found.confirmed, found.monotone) == (True, True)


def test_a_server_that_never_keeps_the_target_has_no_boundary() -> None:
    found = Search(server(0.0001), target=0.95, seeds=(0,), fresh=(1,)).boundary(1.0)
    assert (found.load, found.confirmed) == (None, None)


def test_a_load_without_a_request_ends_the_way_down() -> None:
    """As a short window has them: nothing can be seen there, and less below."""
    asked: list[float] = []

    def run(load: float, seed: int) -> Block:
        asked.append(load)
        return Block(0, int(load * 4), True)

    found = Search(run, target=0.95, seeds=(0, 1), fresh=(10, 11)).boundary(1.0)
    assert found.load is None
    assert sorted(set(asked)) == [0.125, 0.25, 0.5, 1.0]
    assert (found.probes[-1].load, found.probes[-1].offered, found.probes[-1].blocks) == (0.125, 0, 2)


def test_few_requests_leave_it_unresolved() -> None:
    verdict, share, low, high = judge([Block(95, 100), Block(96, 100)], 0.95)
    assert verdict is Verdict.UNRESOLVED
    assert low < 0.95 < high
    assert share == 0.955


def test_a_backlog_that_grows_does_not_pass() -> None:
    assert judge([Block(2_000, 2_000, settled=False)] * 3, 0.95)[0] is Verdict.FAIL


def test_blocks_that_differ_more_than_chance_count_for_less() -> None:
    assert design_effect([Block(95, 100)] * 5) == 1.0
    assert design_effect([Block(100, 100), Block(90, 100), Block(100, 100), Block(90, 100)]) > 5
    assert design_effect([Block(95, 100)]) == 2.0


def test_an_unresolved_load_is_extended_with_seeds_not_used_before() -> None:
    asked: list[int] = []

    def run(load: float, seed: int) -> Block:
        asked.append(seed)
        return Block(95, 100)

    search = Search(run, target=0.95, seeds=(0, 1), fresh=(), most_blocks=3)
    assert search._probe(1.0) is Verdict.UNRESOLVED
    assert len(asked) == len(set(asked)) == 6


def records(good: set[int], n: int, spacing_s: float = 1.0, late_until_s: float = 0.0) -> list[Record]:
    made = []
    for i in range(n):
        r = Record(i, scheduled_s=i * spacing_s, attempts=1)
        r.partition = Partition.GOOD if i in good else Partition.SLOW_TTFT
        r.end_s = r.scheduled_s + 0.5 if i in good else max(late_until_s, r.scheduled_s + 0.5)  # type: ignore[operator]
        made.append(r)
    return made


def test_recovery_is_the_first_time_from_which_it_holds_for_half_a_minute() -> None:
    bad = set(range(40, 75))  # burst from 40 to 50, trouble until 75, queue until 78
    found = recovery(records(set(range(150)) - bad, 150, late_until_s=78.0), 40.0, 50.0, 150.0, 0.95)
    assert found.recovered_after_s == 30.0
    assert found.failed_requests == 35
    assert found.missed_good_requests == 35.0
    assert (found.offered_after, found.good_after) == ((10, 10, 10), (0, 0, 5))


def test_a_run_that_does_not_recover_is_censored_at_its_end() -> None:
    found = recovery(records(set(range(40)), 150, late_until_s=999.0), 40.0, 50.0, 150.0, 0.95)
    assert (found.recovered_after_s, found.censored_at_s) == (None, 100.0)


def test_a_growing_queue_is_not_settled() -> None:
    growing = records(set(), 100, late_until_s=999.0)
    assert settled(records(set(range(100)), 100), 100.0)
    assert not settled([r for r in growing if (r.scheduled_s or 0) >= 60], 100.0)


def test_a_burst_adds_the_rows_of_its_time_and_keeps_the_rest() -> None:
    classes = {"interactive": ServiceClass("interactive")}
    base = Schedule(tuple(Row(i, float(i), 5, 1, (i,)) for i in range(10)), 10.0, 5.0, 512, classes)
    extra = Schedule(tuple(Row(i, i * 0.5, 5, 1, (100 + i,)) for i in range(20)), 10.0, 5.0, 512, classes)
    both = Burst.parse("3x@4+2").over(base, extra)
    assert len(both.rows) == 14
    assert [row.at_s for row in both.rows if row.blocks[0] >= 100] == [4.0, 4.5, 5.0, 5.5]
    assert [row.id for row in both.rows] == list(range(14))
    assert both.sha256 != base.sha256


@pytest.mark.parametrize("text", ["3@60+20", "3x60+20", "1x@60+20", "3x@0+5", "x@+"])
def test_a_wrong_burst_is_named(text: str) -> None:
    with pytest.raises(ScheduleError, match="--burst"):
        Burst.parse(text)
