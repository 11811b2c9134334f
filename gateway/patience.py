"""How long something is waited for, where being late may be the gateway's own doing and somebody else gets the blame.

A timer that rings late says that this loop stood still, or that the machine gave it no time: what was waited for may
lie unread in the kernel. So the time by which it was late is given back, at most the whole time and `MOST_GIVEN_BACK`
times: whoever never answers is still given up.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

LATE_S = 0.02  # from which a loop is late
MOST_GIVEN_BACK = 3  # times


class Patience:
    """`async with Patience(2.0):` raises TimeoutError after so many seconds; None: never."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._bound = asyncio.timeout(None)
        self._left = MOST_GIVEN_BACK
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._bound.__aenter__()
        if self._timeout_s is not None:
            self._arm(self._timeout_s)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._bound.__aexit__(kind, error, trace)

    def _arm(self, in_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(in_s, self._rang, loop, loop.time() + in_s)

    def _rang(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        late_s = loop.time() - due
        if late_s > LATE_S and self._left and self._timeout_s is not None:
            self._left -= 1
            self._arm(min(late_s, self._timeout_s))
        else:
            self._bound.reschedule(loop.time())
