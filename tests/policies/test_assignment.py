"""Who belongs to which arm: always the same for the same key, and as few as possible move when weights do."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.assignment import BUCKETS, bucket, hashed, order, pick, unit

SALTS = tuple(hashed(name, 7) for name in ("a", "b", "c"))
KEYS = [hashed(f"session-{i}", 7) for i in range(4000)]
WEIGHTS = st.lists(st.floats(0.05, 20.0), min_size=3, max_size=3)


def arms(weights: list[float]) -> list[int]:
    return [pick(key, SALTS, weights) for key in KEYS]


def test_a_key_keeps_its_arm_and_another_seed_deals_anew() -> None:
    assert hashed("session-1", 7) == 0x52F1D6AD229A9B3D  # every gateway, every version
    assert hashed("session-1", 8) != hashed("session-1", 7)


def test_arms_get_their_shares() -> None:
    got = arms([1.0, 1.0, 2.0])
    assert [round(got.count(arm) / len(got), 2) for arm in range(3)] == pytest.approx([0.25, 0.25, 0.5], abs=0.02)
    assert set(arms([1.0, 0.0, 2.0])) == {0, 2}


@given(WEIGHTS, st.integers(0, 2), st.floats(1.0, 9.0))
def test_only_keys_of_the_growing_arm_move_when_a_weight_grows(weights: list[float], arm: int, factor: float) -> None:
    grown = [w * (factor if i == arm else 1.0) for i, w in enumerate(weights)]
    assert all(after in (before, arm) for before, after in zip(arms(weights), arms(grown), strict=True))


def test_no_weight_is_an_error_that_says_what_would_be_right() -> None:
    with pytest.raises(ValueError, match="at least one above 0"):
        pick(KEYS[0], SALTS, [0.0, 0.0, 0.0])


def test_buckets_are_used_evenly_and_say_nothing_about_the_arm() -> None:
    counts = [0] * BUCKETS
    for key in KEYS:
        counts[bucket(key)] += 1
    assert min(counts) > 0
    first = [pick(key, SALTS, [1.0, 1.0, 0.0]) for key in KEYS if bucket(key) < BUCKETS // 2]
    assert sum(first) / len(first) == pytest.approx(0.5, abs=0.03)


def test_a_hash_is_never_zero_or_one() -> None:
    assert 0.0 < unit(0) < unit((1 << 64) - 1) < 1.0


@given(st.integers(0, 10**6), st.integers(-(10**6), 10**9), st.integers(1, 8))
def test_the_order_of_a_block_holds_each_arm_once(seed: int, block: int, n: int) -> None:
    assert sorted(order(seed, block, n)) == list(range(n))


def test_orders_of_two_arms_are_even_and_not_in_turn() -> None:
    firsts = [order(1, block, 2)[0] for block in range(1000)]
    assert sum(firsts) == pytest.approx(500, abs=50)
    assert sum(a != b for a, b in pairwise(firsts)) == pytest.approx(500, abs=50)
