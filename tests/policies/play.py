"""A core played in virtual time: what happens when, in order, with its own wakes in between."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from policies.core import Balancer
from policies.model import Decision


class Play:
    """`each` is told every decision and the moment of it; what follows from one is put down with `at`."""

    def __init__(self, core: Balancer, each: Callable[[Decision, float], None]) -> None:
        self.core = core
        self._each = each
        self._numbers = count()  # of two things at one moment the one that was put down first comes first
        self._events: list[tuple[float, int, Callable[[float], None]]] = []

    def at(self, when: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), call))

    def follow(self, decisions: list[Decision], now: float) -> None:
        for decision in decisions:
            self._each(decision, now)

    def run(self, until: float = float("inf")) -> None:
        while self._events and self._events[0][0] < until:
            wake = self.core.next_wake()
            if wake is not None and wake < self._events[0][0]:
                self.follow(self.core.wake(wake), wake)
                continue
            now, _, call = heapq.heappop(self._events)
            call(now)
