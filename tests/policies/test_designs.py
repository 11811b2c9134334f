"""The three designs: what is shared out, what turns with time, and what is not counted."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest

from policies.designs import Assigner, Assignment, Design, Plan, weighed, without

START = 1_800_000_000.0  # a whole number of blocks of 240 s
SPLIT = Plan("x", Design.SPLIT, ("control", "new"), (1.0, 1.0), 3, START, slice_s=120.0, wash_s=20.0)
SWITCHBACK = replace(SPLIT, design=Design.SWITCHBACK)
PARTITION = replace(SPLIT, design=Design.PARTITION)
KEYS = [f"session-{i}" for i in range(2000)]


def share(plan: Plan, unix: float) -> float:
    """Of keys that are not with the control."""
    assigner = Assigner(plan)
    return sum(assigner.assign(key, unix).arm for key in KEYS) / len(KEYS)


def at(plan: Plan, unix: float, key: str = "session-1") -> Assignment:
    return Assigner(plan).assign(key, unix)


def test_two_gateways_agree_though_they_started_at_different_times() -> None:
    late = replace(SPLIT, started_unix=START + 77.0)
    for plan, other in ((SPLIT, late), (replace(SWITCHBACK), replace(SWITCHBACK, started_unix=START + 77.0))):
        for unix in (START + 300.0, START + 1000.0, START + 5000.0):
            assert [at(plan, unix, k).arm for k in KEYS[:50]] == [at(other, unix, k).arm for k in KEYS[:50]]


def test_a_fixed_split_keeps_a_session_where_it_is() -> None:
    plan = replace(SPLIT, swing=0.0)
    assert {at(plan, START + t).arm for t in range(0, 100_000, 777)} == {at(plan, START).arm}
    assert share(plan, START) == pytest.approx(0.5, abs=0.03)


def test_a_swinging_split_has_one_tenth_then_nine_tenths_and_moves_only_the_difference() -> None:
    shares = sorted(share(SPLIT, START + 1000.0 * 240 + into) for into in (60.0, 180.0))
    assert shares == pytest.approx([0.1, 0.9], abs=0.03)
    before, after = ([at(SPLIT, START + t, key).arm for key in KEYS] for t in (60.0, 180.0))
    moved = sum(a != b for a, b in zip(before, after, strict=True)) / len(KEYS)
    assert moved == pytest.approx(0.8, abs=0.03)


def test_a_small_arm_swings_little() -> None:
    canary = replace(SPLIT, weights=(0.95, 0.05))
    assert canary.shares(0) == pytest.approx((0.99, 0.01))
    assert canary.shares(1) == pytest.approx((0.91, 0.09))


def test_a_switchback_gives_everyone_the_same_arm_and_each_arm_half_of_each_block() -> None:
    for block in range(20):
        arms = [{at(SWITCHBACK, START + block * 240 + into, k).arm for k in KEYS[:20]} for into in (5, 119, 121, 239)]
        assert arms[0] == arms[1] != arms[2] == arms[3]


def test_slices_of_a_switchback_are_as_long_as_the_weights_say() -> None:
    plan = replace(SWITCHBACK, weights=(3.0, 1.0))
    arms = [at(plan, START + 0.5 + t).arm for t in range(2400)]
    assert arms.count(1) == 600


def test_the_wash_of_a_slice_is_not_counted_and_nothing_before_the_first_whole_block() -> None:
    plan = replace(SWITCHBACK, started_unix=START + 10.0)
    counted = [t for t in range(0, 480, 5) if at(plan, START + t).counted]
    assert counted == [*range(260, 360, 5), *range(380, 480, 5)]


def test_on_probation_turns_are_short_shares_do_not_swing_and_nothing_is_counted() -> None:
    turns = replace(SWITCHBACK, started_unix=START + 33.0, probation_s=120.0)
    arms = [at(turns, START + 33.0 + t).arm for t in range(0, 120)]
    assert arms.count(0) == pytest.approx(60, abs=5)
    assert max(len(list(same)) for _, same in groupby(arms)) <= 10
    after = {at(turns, START + t).arm for t in range(155, 239)}
    assert after == {at(SWITCHBACK, START + 155).arm}, "then slices are as they would have been"
    assert not any(at(turns, START + t).counted for t in range(33, 260))
    assert at(turns, START + 261).counted
    swings = replace(SPLIT, started_unix=START + 33.0, probation_s=120.0)
    assert share(swings, START + 40.0) == share(swings, START + 150.0) == pytest.approx(0.5, abs=0.03)
    assert min(share(swings, START + 155.0), 1.0 - share(swings, START + 155.0)) == pytest.approx(0.1, abs=0.03)
    for plan in (turns, swings):
        moved = [t for t in range(0, 300) if plan.moment(START + t).left_s <= 0.0]
        assert moved == []


def test_a_slice_after_probation_knows_the_arm_before_it() -> None:
    for seed in range(20):
        plan = replace(SWITCHBACK, seed=seed, started_unix=START + 115.0, probation_s=120.0)
        begin = START + 240.0  # probation ends 5 s before
        given = at(plan, begin + 60.0)
        assert given.level == int(given.arm != plan.active(begin - 0.5))


def test_a_switchback_says_which_slices_follow_their_own_arm() -> None:
    levels = {(at(SWITCHBACK, START + 60 + 120 * i).level) for i in range(2, 40)}
    assert levels == {0, 1}
    for i in range(3, 40):
        here, before = at(SWITCHBACK, START + 60 + 120 * i), at(SWITCHBACK, START + 60 + 120 * (i - 1))
        assert here.level == int(here.arm != before.arm)


def test_a_partition_keeps_the_group_of_a_session_and_turns_the_arm_of_the_group() -> None:
    groups = {at(PARTITION, START + 60.0 + 120.0 * i).group for i in range(20)}
    assert len(groups) == 1
    arms = [at(PARTITION, START + 60.0 + 120.0 * i).arm for i in range(20)]
    assert arms.count(0) == 10
    here = [at(PARTITION, START + 60.0, key) for key in KEYS]
    assert {(a.group, a.arm) for a in here} in ({(0, 0), (1, 1)}, {(0, 1), (1, 0)})
    assert all(PARTITION.arm_of_group(a.group or 0, START + 60.0) == a.arm for a in here)


def test_groups_are_disjoint_of_matched_size_and_hold_when_a_replica_goes() -> None:
    names = [f"r{i}" for i in range(8)]
    one, two = PARTITION.groups(names)
    assert len(one) == len(two) == 4
    assert sorted(one + two) == names
    assert PARTITION.groups(list(reversed(names))) == [one, two]


def test_a_stopped_arm_returns_its_traffic_and_nothing_of_it_is_counted() -> None:
    stopped = without(replace(SPLIT, swing=0.0), 1, START + 50.0)
    later = [at(stopped, START + 600.0, key) for key in KEYS]
    assert {a.arm for a in later} == {0}
    assert sum(a.counted for a in later) / len(later) == pytest.approx(0.5, abs=0.03)  # the control's own
    assert {at(without(SWITCHBACK, 1, START), START + 60.0 * i).arm for i in range(20)} == {0}


def test_what_cannot_be_says_what_would_be_right() -> None:
    with pytest.raises(ValueError, match="the control takes what others leave"):
        without(SPLIT, 0, START)
    with pytest.raises(ValueError, match="one for each would be right"):
        weighed(SPLIT, (1.0,), START)
