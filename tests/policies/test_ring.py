"""Preference lists: the same for every gateway, and disturbed as little as possible when the fleet changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uhashring import HashRing

from policies.ring import Ring

FLEET = tuple(f"http://10.0.0.{i}:8000" for i in range(8))


def ring(*names: str) -> Ring:
    made = Ring()
    for name in names or FLEET:
        made.add(name)
    return made


def test_the_lists_are_uhashrings() -> None:
    theirs = HashRing(list(FLEET), hash_fn="ketama", vnodes=40)
    for key in map(str, range(200)):
        assert OURS.preference(key) == tuple(node["nodename"] for node in theirs.range(key))


def test_a_chunk_key_is_a_hash_already_and_its_upper_half_the_place_on_the_circle() -> None:
    theirs = HashRing(list(FLEET), hash_fn="ketama", vnodes=40)
    place = theirs.hashi("some key")
    assert OURS.preference(place << 32 | 12345) == OURS.preference("some key")


OURS = ring()


def test_an_empty_ring_prefers_nobody() -> None:
    assert Ring().preference(1) == ()
    assert ring("a").preference(1) == ("a",)


def test_keys_spread_over_all_replicas() -> None:
    homes = [OURS.preference(key)[0] for key in map(str, range(4000))]
    assert all(0.5 < homes.count(name) / (4000 / 8) < 1.6 for name in FLEET)


def test_a_replica_of_twice_the_weight_gets_about_twice_the_keys() -> None:
    weighted = Ring()
    weighted.add("small", 1.0)
    weighted.add("large", 2.0)
    homes = [weighted.preference(key)[0] for key in map(str, range(4000))]
    assert 0.5 < homes.count("large") / 4000 < 0.8


def test_weight_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"weight of 'a' is 0; it must be above 0"):
        Ring().add("a", 0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(FLEET), min_size=2, max_size=8, unique=True), st.data())
def test_removal_moves_only_the_keys_of_the_removed_and_each_to_the_next_on_its_list(
    names: list[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(names))
    before, after = ring(*names), ring(*names)
    after.remove(gone)
    for key in map(str, range(60)):
        assert after.preference(key) == tuple(n for n in before.preference(key) if n != gone)


def test_the_bound_is_in_work_and_the_walk_follows_the_list() -> None:
    first, second, third, *_ = OURS.preference("k")
    idle = dict.fromkeys(FLEET, 1.0)
    assert OURS.within("k", idle) == first
    assert OURS.within("k", {**idle, first: 4.0}) == second
    assert OURS.within("k", {**idle, first: 4.0, second: 4.0}) == third
    assert OURS.within("k", {first: 9.0, second: 9.0}, slack=0.5) == first  # nobody within: stay at home
    assert OURS.within("k", {**idle, first: 4.0}, allowance=3.0) == first
    assert OURS.within("k", {second: 1.0}) == second  # the home is not a candidate
    assert OURS.within("k", {}) is None
