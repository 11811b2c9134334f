"""The upper bound: literal cases that can be solved on paper."""

from __future__ import annotations

import pytest

from loadtests.bound import Bound, least_work, moore_hodgson, upper_bound
from loadtests.profiles import Profile
from loadtests.scenario import Scenario, engine
from loadtests.schedule import Row, Schedule
from policies.model import ServiceClass

# exactly 1 ms a token and nothing else
BARE = Profile("bare", 0.0, 0.0, 0.001, 0.0, 0.0, num_blocks=10_000, max_num_batched_tokens=1000, max_num_seqs=64)
ONE = {"interactive": ServiceClass("interactive", ttft_s=1.0, ttft_s_per_token=0.0, tpot_s=0.1)}


def plan(*rows: Row) -> Schedule:
    return Schedule(rows, 10.0, 10.0, 500, ONE)


def fleet(replicas: int) -> Scenario:
    return Scenario((engine(BARE, None, 512),) * replicas)


def at_once(count: int, blocks: int = 1000) -> list[Row]:
    return [Row(i, 0.0, 500, 1, (blocks + i,)) for i in range(count)]


def test_half_second_prompts_with_one_second_to_start_fit_two_to_a_replica() -> None:
    assert upper_bound(plan(*at_once(7)), fleet(1)).good == pytest.approx(2.0)
    assert upper_bound(plan(*at_once(7)), fleet(3)).good == pytest.approx(6.0)


def test_a_prefix_that_somebody_sent_before_costs_nothing_again() -> None:
    same = [Row(i, 0.0, 500, 1, (7,)) for i in range(50)]
    work = least_work(plan(*same), fleet(1))
    assert (work[0].prefill_s, work[1].prefill_s) == (pytest.approx(0.5), pytest.approx(0.001))
    assert upper_bound(plan(*same), fleet(1)).good == pytest.approx(50.0)


def test_arrivals_far_apart_do_not_disturb_each_other() -> None:
    rows = [Row(i, 2.0 * i, 500, 1, (i,)) for i in range(5)]
    assert upper_bound(plan(*rows), fleet(1)).good == pytest.approx(5.0)


def test_rows_that_do_not_count_take_nothing_from_those_that_do() -> None:
    rows = [*at_once(2), *(Row(10 + i, 11.0, 500, 1, (90 + i,)) for i in range(9))]
    assert upper_bound(plan(*rows), fleet(1)).good == pytest.approx(2.0)


def test_moore_drops_the_longest_when_a_deadline_breaks() -> None:
    # due 3: lengths 2 and 2 do not fit, one goes; due 4: 1 more fits
    assert moore_hodgson([(3.0, 2.0), (3.0, 2.0), (4.0, 1.0)], 0.0) == 2
    assert moore_hodgson([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)], 0.0) == 3
    assert moore_hodgson([], 0.0) == 0


def test_looseness_is_the_bound_over_what_was_achieved() -> None:
    assert Bound(100.0, 100, 5).looseness(80) == 1.25
    assert Bound(100.0, 100, 5).looseness(0) is None
