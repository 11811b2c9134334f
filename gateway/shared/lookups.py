"""What a request wants to know before it is placed, asked for many at once, and for at most `lookup_s` each.

Everything asked for while a batch is on its way goes with the next one. A batch that misses its deadline lets its
requests go on, and so do all that come until it is answered or has failed: a Redis that is slow costs each request one
deadline at most, and only the first of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.shared.store import Command, Store

log = logging.getLogger("forebay.shared")
Done = Callable[["list[bytes | None] | None", Any], None]


@dataclass(slots=True, eq=False)
class Ask:
    """`done` gets the values of the keys and the answer of the command, each None where there was none."""

    keys: Sequence[str]
    command: Command | None
    done: Done | None


@dataclass(slots=True, eq=False)
class Batch:
    asks: list[Ask] = field(default_factory=list)
    late: bool = False


class Lookups:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._next: Batch | None = None
        self._out: Batch | None = None  # on its way
        self._task: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        return self._store.up and (self._out is None or not self._out.late)

    def ask(self, keys: Sequence[str], command: Command | None, done: Done) -> Ask:
        """Only while `usable`. `done` is called once, later, in any case."""
        loop = asyncio.get_running_loop()
        batch = self._next
        if batch is None:
            batch = self._next = Batch()
            loop.call_later(self._store.table.lookup_s, self._expire, batch)
            if self._out is None:
                loop.call_soon(self._send)
        made = Ask(keys, command, done)
        batch.asks.append(made)
        return made

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for batch in (self._out, self._next):
            if batch is not None:
                self._expire(batch)

    def _send(self) -> None:
        batch, self._next = self._next, None
        if batch is not None and self._out is None:
            self._out = batch
            self._task = asyncio.get_running_loop().create_task(self._run(batch))
        elif batch is not None:
            self._next = batch

    async def _run(self, batch: Batch) -> None:
        keys = [key for ask in batch.asks if ask.done is not None for key in ask.keys]
        asked = [ask for ask in batch.asks if ask.done is not None]
        commands: list[Command] = [("MGET", *keys)] if keys else []
        commands += [ask.command for ask in asked if ask.command is not None]
        try:
            answers = await self._store.call("lookup", commands) if commands else []
        finally:
            self._out = None
            if self._next is not None:
                asyncio.get_running_loop().call_soon(self._send)
        if answers is None:
            self._expire(batch)
            return
        rest = iter(answers)
        values = next(rest) if keys else []
        at = 0
        for ask in asked:
            own = next(rest) if ask.command is not None else None
            found = None if isinstance(values, Exception) else values[at : at + len(ask.keys)]
            at += len(ask.keys)
            _tell(ask, found, None if isinstance(own, Exception) else own)

    def _expire(self, batch: Batch) -> None:
        """Its time is over: whoever still waits goes on without."""
        waiting = [ask for ask in batch.asks if ask.done is not None]
        if waiting and batch is self._out:
            batch.late = True
        if batch is self._next:
            self._next = None
        for ask in waiting:
            _tell(ask, None, None)


def _tell(ask: Ask, values: list[bytes | None] | None, answer: Any) -> None:
    """Once. What goes wrong with one request is no reason to leave the others of its batch waiting."""
    done, ask.done = ask.done, None
    if done is not None:
        try:
            done(values, answer)
        except Exception:
            log.exception("a request failed when Redis had answered")
