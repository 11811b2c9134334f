"""A coroutine that callbacks move on: what a task does, without the task.

A request that is dispatched at once waits a single time, for the end of its answer. `begin` runs the coroutine up to
that point inside the callback that brought the request, and `wake` goes on inside the callback that brought the
answer; neither goes through the event loop, which costs as much as all the parsing of a short request. Awaited as
usual (`await run()`), the same coroutine waits on a future instead. Trade-off: what is awaited in it must be `pause`,
and whoever wakes it at once must be done with what it does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterator
from typing import Any

log = logging.getLogger("forebay.proxy")
_ONCE = (None,)


class _Pause:
    """Hands control to whoever drives the coroutine, once."""

    def __await__(self) -> Iterator[None]:
        return iter(_ONCE)


_PAUSE: Awaitable[None] = _Pause()  # type: ignore[assignment]  # an iterator does where a generator is asked for


class Driven:
    """Base of what has a `run` that waits by `pause` only."""

    _steps: Coroutine[Any, Any, None] | None = None  # set while callbacks drive it
    _waiter: asyncio.Future[None] | None = None  # what it waits for under a task
    _paused = False

    def run(self) -> Coroutine[Any, Any, None]:
        raise NotImplementedError

    def begin(self) -> None:
        """Runs until it waits for the first time."""
        self._steps = self.run()
        self._go_on()

    def pause(self) -> Awaitable[None]:
        """Awaited: until `wake`. The reason for waking is for the caller to look up."""
        if self._steps is not None:
            self._paused = True
            return _PAUSE
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def wake(self, at_once: bool = False) -> None:
        """Lets it go on, now or in the loop's next turn; nothing happens while it does not wait."""
        if self._paused:
            self._paused = False
            if at_once:
                self._go_on()
            else:
                asyncio.get_running_loop().call_soon(self._go_on)
        elif self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            if not waiter.done():  # or its task was cancelled
                waiter.set_result(None)

    def _go_on(self) -> None:
        steps = self._steps
        assert steps is not None
        try:
            steps.send(None)
        except StopIteration:
            self._steps = None  # it knows us: without this only the garbage collector could free both
        except Exception:
            self._steps = None
            log.exception("a request failed in its last step")
