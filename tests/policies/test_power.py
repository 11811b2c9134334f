"""How long an experiment must run, said before it starts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from policies.designs import Design
from policies.power import Traffic, measured, needed_se, needs

USUAL = Traffic(rate_rps=20.0, attainment=0.9, turns=1.0)
EVEN = (1.0, 1.0)


def hours(design: Design, smallest: float, traffic: Traffic = USUAL, weights: tuple[float, ...] = EVEN) -> float:
    return needs(design, traffic, smallest, weights, 120.0, 20.0, swing=0.0).hours


def test_the_error_that_is_needed_leaves_room_for_looking_at_any_time() -> None:
    # 3.04 se of width and 0.84 se of power at the planned information's neighbourhood
    assert 0.02 / needed_se(0.02) == pytest.approx(3.9, abs=0.15)


def test_a_split_needs_the_textbooks_requests() -> None:
    found = needs(Design.SPLIT, USUAL, 0.02, EVEN, 120.0, 20.0, swing=0.0)
    assert found.requests == pytest.approx(0.9 * 0.1 * 4 / needed_se(0.02) ** 2)
    assert found.hours == pytest.approx(found.requests / 20.0 / 3600.0)


def test_half_the_difference_takes_four_times_as_long() -> None:
    assert hours(Design.SPLIT, 0.01) / hours(Design.SPLIT, 0.02) == pytest.approx(4.0, rel=0.01)


def test_long_sessions_and_a_small_arm_take_longer() -> None:
    assert hours(Design.SPLIT, 0.02, replace(USUAL, turns=11.0)) == pytest.approx(2 * hours(Design.SPLIT, 0.02))
    assert hours(Design.SPLIT, 0.02, weights=(0.95, 0.05)) > 5 * hours(Design.SPLIT, 0.02)


def test_slices_that_differ_from_hour_to_hour_rule_over_the_number_of_requests() -> None:
    calm = needs(Design.SWITCHBACK, USUAL, 0.02, EVEN, 120.0, 20.0)
    rough = needs(Design.SWITCHBACK, replace(USUAL, slice_spread=0.05), 0.02, EVEN, 120.0, 20.0)
    assert calm.blocks == 10  # the fewest that give an interval
    assert rough.blocks == pytest.approx(2 * 0.05**2 / needed_se(0.02) ** 2)
    assert rough.hours == pytest.approx((rough.blocks or 0) * 240.0 / 3600.0)
    assert "lower bounds" in calm.why


def test_what_cannot_be_says_what_would_be_right() -> None:
    with pytest.raises(ValueError, match="a share above 0 and below 1"):
        hours(Design.SPLIT, 0.0)
    with pytest.raises(ValueError, match="rate 0: more than 0 requests a second"):
        hours(Design.SPLIT, 0.02, replace(USUAL, rate_rps=0.0))


def test_a_group_of_a_partition_has_part_of_the_traffic_and_two_slices_of_a_block() -> None:
    rough = replace(USUAL, slice_spread=0.05)
    found = [needs(design, rough, 0.02, EVEN, 120.0, 20.0).blocks for design in (Design.PARTITION, Design.SWITCHBACK)]
    assert found[0] == pytest.approx(found[1])


def test_traffic_is_measured_from_what_a_journal_says() -> None:
    rng = random.Random(3)
    rows = []
    for session in range(3000):
        luck = rng.random() < 0.5  # half of the sessions never miss, the others miss one of four
        at = rng.uniform(0.0, 7200.0)
        rows += [(at + i, f"s{session}", luck or rng.random() < 0.75) for i in range(4)]
    found = measured(rows, 60.0)
    assert found.rate_rps == pytest.approx(12000 / 7200, rel=0.01)
    assert found.attainment == pytest.approx(0.875, abs=0.01)
    assert found.turns == 4.0
    # variance between sessions 0.125^2 of 0.875 x 0.125 in all
    assert found.within == pytest.approx(0.125**2 / (0.875 * 0.125), abs=0.03)
    # about 100 requests a slice, in sessions
    assert found.slice_spread == pytest.approx((0.875 * 0.125 * (1 + 3 * 0.143) / 100) ** 0.5, rel=0.2)


def test_a_short_journal_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^holds 60 s of traffic; at least ten slices of 60 s would be right$"):
        measured([(0.0, None, True), (60.0, None, True)], 60.0)
