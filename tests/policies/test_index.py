"""The prefix index believes what our own dispatches say, forgets as vLLM does, and never more than fits."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.index import PrefixIndex
from policies.prefix import chain

A = (1, 2, 3, 4)  # keys stand for chunks; equal beginnings are equal prefixes
B = (1, 2, 5, 6)
C = (7, 8)


def index(*replicas: str, capacity: int | None = None) -> PrefixIndex:
    made = PrefixIndex()
    for replica in replicas:
        made.add(replica, capacity)
    return made


def test_a_replica_matches_as_far_as_it_was_given_the_same_beginning() -> None:
    it = index("a", "b", "c")
    it.insert(0, A)
    it.insert(1, B)
    assert it.depths(A) == [4, 2, 0]
    assert it.depths(B) == [2, 4, 0]
    assert it.depths(C) == [0, 0, 0]
    assert it.depths(()) == [0, 0, 0]


def test_eviction_takes_the_least_recently_used_request_first_and_its_tail_first() -> None:
    it = index("a", capacity=6)
    it.insert(0, A)
    it.insert(0, C)  # full: 4 + 2
    it.insert(0, (9,))
    assert it.depths(A) == [3]
    assert it.depths(C) == [2]
    it.insert(0, A[:3])  # used again: now C is the oldest
    it.insert(0, (10,))
    assert (it.depths(A), it.depths(C)) == ([3], [1])


def test_a_shared_beginning_outlives_its_branches() -> None:
    it = index("a", capacity=6)
    it.insert(0, A)
    it.insert(0, B)  # 1 2 are shared: six chunks
    it.insert(0, (9,))
    assert (it.depths(A), it.depths(B)) == ([3], [4])
    it.insert(0, (10, 11, 12))
    assert (it.depths(A), it.depths(B)) == ([2], [2])


def test_a_chain_longer_than_the_capacity_keeps_its_beginning() -> None:
    it = index("a", capacity=3)
    it.insert(0, A)
    assert it.depths(A) == [3]
    assert it.chunks("a") == 3


def test_the_answer_is_credited_to_a_longer_chain_that_passes_the_same_point() -> None:
    it = index("a", "b")
    it.insert(0, A, credit=3)
    next_turn = (*A, 21, 22, 23, 24, 25)
    assert it.depths(next_turn) == [7, 0]
    assert it.depths(A) == [4, 0]  # the request itself is no longer than itself
    assert it.depths((*A, 21)) == [5, 0]  # a credit never reaches beyond the chain
    assert it.depths((1, 2, 3, 30, 31)) == [3, 0]  # nor does it count where the chain parts before
    it.insert(0, next_turn)
    assert it.depths((*A, 21, 40, 41)) == [5, 0]  # the answer has keys now, the credit is spent


def test_credit_reaches_beyond_what_is_hashed_of_a_long_prompt() -> None:
    it = index("a")
    it.insert(0, A, credit=100)
    assert it.depths(A, total_chunks=90) == [90]


def test_credited_chunks_take_room_and_go_first() -> None:
    it = index("a", capacity=8)
    it.insert(0, A, credit=3)
    assert it.chunks("a") == 7
    it.insert(0, C)
    assert it.chunks("a") == 8
    assert it.depths((*A, 21, 22, 23)) == [6]


def test_a_restart_or_a_removal_forgets_one_replica_only() -> None:
    it = index("a", "b")
    it.insert(0, A, credit=2)
    it.insert(1, A, credit=2)
    it.clear("a")
    assert it.depths((*A, 21)) == [0, 5]
    it.remove("b")
    assert it.depths(A) == [0, -1]
    assert len(it) == 0
    assert it.add("c") == 1  # the slot is used again, empty
    assert it.depths(A) == [0, 0]


def test_a_dispatch_that_never_prefilled_is_taken_back_except_for_what_others_use() -> None:
    it = index("a")
    it.insert(0, A[:2])
    it.insert(0, A)
    it.forget("a", A, keep=2)
    assert it.depths(A) == [2]
    it.insert(0, A)
    it.insert(0, (*A, 5, 6))
    it.forget("a", A, keep=2)  # another request continues A: it is there
    assert it.depths((*A, 5, 6)) == [6]


def test_feedback_may_shrink_a_replica_at_once() -> None:
    it = index("a")
    it.insert(0, A)
    it.insert(0, C)
    it.resize("a", 3)
    assert (it.depths(A), it.depths(C)) == ([1], [2])
    assert (it.capacity("a"), it.chunks("a")) == (3, 3)


def test_what_was_last_used_before_a_time_expires_with_its_answer() -> None:
    it = index("a", "b")
    it.insert(0, A, credit=3, now=10.0)
    it.insert(0, B, now=20.0)  # its first two chunks are those of A
    it.insert(1, A, now=10.0)
    it.expire(0, 10.0)
    assert it.depths((*A, 21, 22, 23)) == [7, 4], "at that time is not before it"
    it.expire(0, 15.0)
    assert it.depths(A) == [2, 4], "of another replica nothing is said"
    assert it.depths(B) == [4, 2]
    assert it.chunks("a") == 4
    it.expire(0, 25.0)
    assert (it.depths(B), it.chunks("a")) == ([0, 2], 0)


def test_very_much_expires_with_several_calls() -> None:
    it = index("a")
    for start in range(0, 10_000, 1000):
        it.insert(0, tuple(range(start, start + 1000)), now=1.0)
    left = []
    while it.chunks("a"):
        it.expire(0, 2.0)
        left.append(it.chunks("a"))
    assert left == [6000, 2000, 0]


class Naive:
    """The rule in its plainest form: chunks by last use, where a request uses its tail before its beginning."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[tuple[int, ...], int] = {}
        self.clock = 0

    def insert(self, path: Sequence[int]) -> None:
        for depth in range(len(path), 0, -1):
            self.clock += 1
            self.used[tuple(path[:depth])] = self.clock
        while len(self.used) > self.capacity:
            del self.used[min(self.used, key=lambda prefix: self.used[prefix])]

    def depth(self, path: Sequence[int]) -> int:
        return next((d for d in range(len(path), 0, -1) if tuple(path[:d]) in self.used), 0)


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def keyed(path: Sequence[int]) -> tuple[int, ...]:
    """Chained keys of a path: equal beginnings, equal keys."""
    return chain([bytes([step]) * 256 for step in path])


@settings(max_examples=300)
@given(st.integers(1, 12), st.lists(paths, max_size=25), paths)
def test_it_holds_exactly_what_the_plain_rule_holds(capacity: int, inserted: list[list[int]], asked: list[int]) -> None:
    it, naive = index("a", capacity=capacity), Naive(capacity)
    for path in inserted:
        it.insert(0, keyed(path))
        naive.insert(path)
        assert it.depths(keyed(asked)) == [naive.depth(asked)]
    assert it.chunks("a") == len(naive.used)


@settings(max_examples=300)
@given(st.lists(paths, max_size=25), st.integers(0, 25), paths)
def test_what_expires_is_what_the_plain_rule_says(inserted: list[list[int]], before: int, asked: list[int]) -> None:
    it = index("a")
    used: dict[tuple[int, ...], int] = {}
    for at, path in enumerate(inserted):
        it.insert(0, keyed(path), now=float(at))
        used |= {tuple(path[:depth]): at for depth in range(1, len(path) + 1)}
    it.expire(0, float(before))
    kept = {path for path, at in used.items() if at >= before}
    assert it.chunks("a") == len(kept)
    assert it.depths(keyed(asked)) == [sum(tuple(asked[:depth]) in kept for depth in range(1, len(asked) + 1))]


operations = st.lists(
    st.tuples(st.sampled_from(["insert", "credit", "clear", "forget", "resize", "expire"]), st.integers(0, 2), paths),
    max_size=40,
)


@settings(max_examples=200)
@given(operations)
def test_never_more_than_capacity_and_holding_a_chunk_means_holding_all_before_it(
    operations: list[tuple[str, int, list[int]]],
) -> None:
    names = ("a", "b", "c")
    it = index(*names, capacity=10)
    for at, (what, slot, path) in enumerate(operations):
        match what:
            case "insert":
                it.insert(slot, keyed(path), now=float(at))
            case "credit":
                it.insert(slot, keyed(path), credit=len(path), now=float(at))
            case "expire":
                it.expire(slot, float(at - len(path)))
            case "clear":
                it.clear(names[slot])
            case "forget":
                it.forget(names[slot], keyed(path), keep=len(path) // 2)
            case "resize":
                it.resize(names[slot], 4 + len(path))
        for name in names:
            capacity = it.capacity(name)
            assert capacity is not None
            assert it.chunks(name) <= capacity
        depths = [it.depths(keyed(path)[:n]) for n in range(len(path) + 1)]
        for longer, shorter in zip(depths[1:], depths, strict=False):
            assert all(s <= n <= s + 1 for n, s in zip(longer, shorter, strict=True))
    for name in names:
        it.remove(name)
    assert len(it) == 0
