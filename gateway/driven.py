"""A coroutine that callbacks move on: what a task does, without the task.

`drive` runs the coroutine up to where it waits, inside the callback that gave the reason; `wake` goes on, at once in
the callback that calls it, or in the loop's next turn. Awaited in a task as usual, the same coroutine waits on a
future instead. Trade-off: what is awaited in it must be `pause`, and whoever wakes it at once must be done with what
it does.
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
    """Base of what has coroutines that wait by `pause` only."""

    _steps: Coroutine[Any, Any, None] | None = None  # set while callbacks drive it
    _waiter: asyncio.Future[None] | None = None  # what it waits for under a task
    _paused = False

    def drive(self, steps: Coroutine[Any, Any, None]) -> None:
        """Runs it until it waits for the first time."""
        self._steps = steps
        self._go_on()

    def ready(self, steps: Coroutine[Any, Any, None]) -> None:
        """Begins with the next `wake`."""
        self._steps = steps
        self._paused = True

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
