"""Which question each design answers: what a full switch would do, and what is only true side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies import effects
from policies.designs import Design, Plan
from policies.effects import Counts
from policies.guard import Rails, breach

SPLIT = Plan("x", Design.SPLIT, ("control", "new"), (1.0, 1.0), 0, 0.0)


def linear(plan: Plan) -> Counts:
    """The control has 0.9 - 0.2 x the arm's share, the arm 0.8 + 0.1 x the control's: full switch 0.8 - 0.9."""
    counts = Counts.new()
    for block in range(20):
        for level in (0, 1):
            share = plan.shares(level)[0]
            for arm, rate in ((0, 0.9 - 0.2 * (1 - share)), (1, 0.8 + 0.1 * share)):
                good = round(1000 * rate)
                for i in range(1000):
                    counts.blocks.add((arm, level), block, i < good, False, None, 0.0)
                    counts.buckets.add((arm, 0), i % 256, i < good, False, None, 0.0)
    return counts


def test_a_swinging_split_draws_the_rates_on_to_a_full_switch() -> None:
    counts = linear(SPLIT)
    whole, beside = effects.effect(SPLIT, counts, 1), effects.direct(SPLIT, counts, 1)
    missed = effects.interference(SPLIT, counts)
    assert whole is not None
    assert beside is not None
    assert missed is not None
    assert whole.estimate == pytest.approx(-0.1)
    assert beside.estimate == pytest.approx(0.05)  # a plain reading has the wrong sign
    assert missed.estimate == pytest.approx(-0.15)


def test_a_fixed_split_says_only_what_is_true_side_by_side() -> None:
    fixed = replace(SPLIT, swing=0.0)
    counts = linear(SPLIT)
    found = effects.effect(fixed, counts, 1)
    assert found is not None
    assert found.estimate == pytest.approx(0.05)
    assert effects.interference(fixed, counts) is None


def test_a_partition_takes_out_what_its_groups_differ_by() -> None:
    plan = replace(SPLIT, design=Design.PARTITION)
    counts = Counts.new()
    for block in range(12):
        for group, base in ((0, 0.9), (1, 0.5)):
            n = 100 if group == 0 else 300  # and by how much they get
            for arm in (0, 1):
                for i in range(n):
                    counts.blocks.add((arm, group), block, i < n * (base + 0.1 * arm), False, None, 0.0)
    found = effects.effect(plan, counts, 1)
    assert found is not None
    assert found.estimate == pytest.approx(0.1, abs=0.01)


def test_a_switchback_shows_what_an_arm_leaves_to_the_next() -> None:
    plan = replace(SPLIT, design=Design.SWITCHBACK)
    counts = Counts.new()
    for block in range(24):
        level = block % 2
        for i in range(100):
            counts.blocks.add((0, level), block, i < (80 if level else 90), False, None, 0.0)
            counts.blocks.add((1, level), block, i < 95, False, None, 0.0)
    found = effects.carry_over(plan, counts, 0)
    clean = effects.carry_over(plan, counts, 1)
    assert found is not None
    assert clean is not None
    assert found.estimate == pytest.approx(-0.1)
    assert clean.estimate == pytest.approx(0.0)
    assert effects.carry_over(SPLIT, counts, 0) is None


def judged(good: tuple[float, float], errors: float = 0.0, pace: float = 0.5, requests: int = 600) -> str | None:
    counts = Counts.new().buckets
    for arm in (0, 1):
        for i in range(requests):
            bad = arm == 1 and i < errors * requests
            counts.add((arm, 0), (i * 7) % 256, i % 20 < 20 * good[arm], bad, pace if arm else 0.5, 0.0)
    found = breach(Rails(), 2, 1, counts)
    return None if found is None else found.rail


def test_guard_rails_break_for_harm_and_only_with_enough_to_tell() -> None:
    assert judged((0.9, 0.9)) is None
    assert judged((0.9, 0.95)) is None
    assert judged((0.9, 0.6)) == "attainment"
    assert judged((0.9, 0.6), requests=99) is None
    assert judged((0.9, 0.9), errors=0.2) == "errors"
    assert judged((0.9, 0.9), pace=0.8) == "pace"
    assert judged((0.9, 0.9), pace=0.6) is None  # slower, within the bound


def test_a_rail_that_is_off_does_not_break() -> None:
    counts = Counts.new().buckets
    for i in range(600):
        counts.add((0, 0), i % 256, True, False, None, 0.0)
        counts.add((1, 0), i % 256, i % 2 == 0, False, None, 0.0)
    assert breach(Rails(attainment_drop=None), 2, 1, counts) is None
    assert breach(Rails(), 2, 1, counts) is not None
