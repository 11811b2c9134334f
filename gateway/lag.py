"""How late the event loop runs its timers: the one honest sign that the gateway itself is the bottleneck.

A timer is set every 100 ms and its lateness measured. Everything on the loop (streams, decisions, scrapes) is at
least this late, so it is exported, a loop that is late by more than the pulse interval makes pacing blind, and one
that stays late closes the door (`door.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.1
MEMORY = 0.1  # of the running mean


class LoopLag:
    """`told` hears the running mean at each measurement."""

    def __init__(self, told: Callable[[float], None] | None = None) -> None:
        self.mean_s = 0.0
        self.told = told
        self._worst_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(INTERVAL_S, self._rang, loop, loop.time() + INTERVAL_S)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def worst_s(self) -> float:
        """Worst since the last call."""
        worst, self._worst_s = self._worst_s, 0.0
        return worst

    def late(self, late_s: float) -> None:
        """One measurement."""
        self.mean_s += MEMORY * (late_s - self.mean_s)
        self._worst_s = max(self._worst_s, late_s)
        if self.told is not None:
            self.told(self.mean_s)

    def _rang(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self.late(max(0.0, loop.time() - due))
        self._timer = loop.call_later(INTERVAL_S, self._rang, loop, loop.time() + INTERVAL_S)
