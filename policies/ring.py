"""Preference lists by consistent hashing: the order in which replicas are asked about a key.

uhashring's ketama ring (md5, 160 points per unit of weight) gives the points; a key belongs to the first point after
its hash, and the list is the unique replicas clockwise from there. Removing a replica leaves the order of the others
as it was, so only its own keys move (about 1/n), each to the next on its own list. uhashring walks the ring anew for
each lookup (hundreds of us for 64 replicas); here the list of each point is made with the ring, so a
lookup is one bisection. Sources: Karger et al. 1997; bounded loads: Mirrokni et al., arXiv 1608.01350.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable

from uhashring import HashRing

_VNODES = 40  # times 4 points of each md5 digest


class Ring:
    """Replicas with weights; lists are stable between changes of membership."""

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        self._hash: Callable[[str], int] | None = None
        self._points: list[int] = []
        self._lists: list[tuple[str, ...]] = []

    def add(self, replica_id: str, weight: float = 1.0) -> None:
        """weight: share of keys relative to the others, above 0."""
        if not weight > 0:
            raise ValueError(f"weight of {replica_id!r} is {weight}; it must be above 0")
        self.weights[replica_id] = weight
        self._hash = None

    def remove(self, replica_id: str) -> None:
        """Unknown replicas are ignored: a removal may be reported twice."""
        if self.weights.pop(replica_id, None) is not None:
            self._hash = None

    def __len__(self) -> int:
        return len(self.weights)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self.weights

    def preference(self, key: int | str) -> tuple[str, ...]:
        """Every replica once, the key's home first; empty for an empty ring."""
        if self._hash is None:
            self._build()
        if not self._points:
            return ()
        assert self._hash is not None
        # an int is a 64-bit hash already: its upper half is its place on ketama's 32-bit circle
        place = key >> 32 if isinstance(key, int) else self._hash(key)
        return self._lists[bisect(self._points, place) % len(self._points)]

    def within(self, key: int | str, work: dict[str, float], slack: float = 1.25, allowance: float = 0.0) -> str | None:
        """First replica of the key's list whose work is at most slack x the mean + allowance; the first if none is.

        work: current work of each candidate in one unit (seconds of prefill, tokens, requests); others are skipped.
        """
        if not work:
            return None
        bound = slack * sum(work.values()) / len(work) + allowance
        first: str | None = None
        for replica_id in self.preference(key):
            load = work.get(replica_id)
            if load is None:
                continue
            if load <= bound:
                return replica_id
            first = first or replica_id
        return first

    def _build(self) -> None:
        nodes = {name: {"vnodes": max(1, round(_VNODES * weight))} for name, weight in self.weights.items()}
        ring = HashRing(nodes, hash_fn="ketama")
        points: list[tuple[int, str]] = ring.get_points()
        self._hash = ring.hashi
        self._points = [point for point, _ in points]
        self._lists = _lists([name for _, name in points])


def _lists(names: list[str]) -> list[tuple[str, ...]]:
    """The list of each point: its own replica, then the next point's list without it; made backwards."""
    following = tuple(dict.fromkeys(names))
    lists = [following] * len(names)
    for at in range(len(names) - 1, -1, -1):
        name = names[at]
        if following[0] != name:
            found = following.index(name)
            following = (name, *following[:found], *following[found + 1 :])
        lists[at] = following
    return lists
