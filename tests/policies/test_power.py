"""How long an experiment must run, said before it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.designs import Design
from policies.power import Traffic, needed_se, needs

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
    assert "lower bound" in calm.why


def test_what_cannot_be_says_what_would_be_right() -> None:
    with pytest.raises(ValueError, match="a share above 0 and below 1"):
        hours(Design.SPLIT, 0.0)
    with pytest.raises(ValueError, match="rate above 0"):
        hours(Design.SPLIT, 0.02, replace(USUAL, rate_rps=0.0))
