"""The clock that gateways share: Redis' own, as told with each exchange.

A gateway asks Redis for its time and notes its own before and after: Redis is ahead by its time minus the middle of the
two, and wrong by half the round trip at most (Cristian 1989). Of the last answers the one that took least time counts.
Slices of an experiment then turn at the same moment everywhere, whatever NTP makes of the hosts.
Trade-off: after a failover to a host with another time all gateways move together within some seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gateway.shared.store import Command

KEPT = 50  # answers, about five seconds


class SharedClock:
    """`ahead_s`: of Redis before our own wall clock; 0 until it answers."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self.ahead_s = 0.0
        self._wall = wall
        self._asked_unix = 0.0
        self._seen: deque[tuple[float, float]] = deque(maxlen=KEPT)  # round trip, ahead

    def command(self) -> Command:
        self._asked_unix = self._wall()
        return ("TIME",)

    def heard(self, answer: Any) -> None:
        """The answer to the last `command`."""
        if isinstance(answer, Exception):
            return
        seconds, micros = answer
        now = self._wall()
        there = int(seconds) + int(micros) * 1e-6
        self._seen.append((now - self._asked_unix, there - (now + self._asked_unix) / 2.0))
        self.ahead_s = min(self._seen)[1]
