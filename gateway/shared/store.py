"""The connection to Redis (or Valkey): every call has a deadline, and none is made while it is known to be away.

One call in the background, the registers' every tenth of a second, is the probe: when it fails Redis is down and nobody
else asks, when it succeeds again Redis is up. So a request never waits for a Redis that is gone, and recovery needs
nobody. After a failure connections are made anew, which follows an address that moved in a failover. Calls are batches
without a transaction; a command that Redis refuses (full, read-only) fails alone, as a value.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.shared.table import RedisTable

Command = Sequence[Any]
MOST_LINES, PER_S = 6, 60.0  # of the log about changes
log = logging.getLogger("forebay.shared")


class Store:
    """`calls` counts outcomes by call: ok, late, failed, refused."""

    def __init__(self, table: RedisTable, environ: Mapping[str, str]) -> None:
        assert table.url is not None
        parts = urlsplit(table.url)
        self.where = f"{parts.hostname}:{parts.port or 6379}"
        self.table = table
        self.up = False
        self.calls: Counter[tuple[str, str]] = Counter()
        self._log = Changes(self.where)
        options: dict[str, Any] = {
            "username": environ.get(table.user_env or "") or None,
            "password": environ.get(table.password_env or "") or None,
            "socket_timeout": table.call_s,
            "socket_connect_timeout": table.call_s,
            "retry": Retry(NoBackoff(), 0),
            "max_connections": 16,
            "protocol": 2,
            "client_name": "forebay",
        }
        self._redis: Any = Redis.from_url(table.url, **options)

    def key(self, *parts: str) -> str:
        """All keys carry one hash tag, so that a cluster keeps them together."""
        return ":".join((f"{{{self.table.key_prefix}}}", *parts))

    async def call(self, name: str, commands: Sequence[Command], probe: bool = False) -> list[Any] | None:
        """The answers, with errors of single commands in their places. None: no answer in time, or Redis is away."""
        if not self.up and not probe:
            return None
        try:
            async with asyncio.timeout(self.table.call_s):
                pipe = self._redis.pipeline(transaction=False)
                for command in commands:
                    pipe.execute_command(*command)
                answers: list[Any] = await pipe.execute(raise_on_error=False)
        except (TimeoutError, exceptions.RedisError, OSError) as error:
            late = isinstance(error, (TimeoutError, exceptions.TimeoutError))
            self.calls[name, "late" if late else "failed"] += 1
            await self._down("no answer in time" if late else _code(error))
            return None
        refused = next((a for a in answers if isinstance(a, Exception)), None)
        self.calls[name, "ok" if refused is None else "refused"] += 1
        if isinstance(refused, exceptions.ReadOnlyError):
            await self._down("it is a replica now")  # a failover: connect to whoever has the address
            return None
        if probe:
            self.up = True
            self._log.seen("" if refused is None else f"refuses commands ({_code(refused)}); it is read as before")
        return answers

    def subscription(self) -> Any:
        """To messages, on a connection of its own; its errors are the caller's."""
        return self._redis.pubsub()

    async def close(self) -> None:
        self.up = False
        await self._redis.aclose()

    async def _down(self, why: str) -> None:
        self.up = False
        self._log.seen(f"{why}; going on with what this gateway knows alone")
        await self._redis.connection_pool.disconnect(inuse_connections=False)


class Changes:
    """Tells the log of each change: what is wrong, another thing that is wrong, nothing any more. A Redis that comes
    and goes fills no log: at most `MOST_LINES` in `PER_S`, and what it is like at the end of them is told in any case.
    """

    def __init__(self, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._where = where
        self._clock = clock
        self._said: str | None = None
        self._seen: str | None = None
        self._untold = 0
        self._lines: deque[float] = deque(maxlen=MOST_LINES)

    def seen(self, trouble: str) -> None:
        """After each call in the background and each failed one; empty: all is well."""
        self._untold += trouble != self._seen
        self._seen = trouble
        now = self._clock()
        full = len(self._lines) == MOST_LINES and now - self._lines[0] < PER_S
        if trouble == self._said or full:
            return
        between = f" ({self._untold - 1} changes before that are not told)" if self._untold > 1 else ""
        self._said, self._untold = trouble, 0
        self._lines.append(now)
        if trouble:
            log.warning("redis %s: %s%s", self._where, trouble, between)
        else:
            log.info("redis %s: answers%s", self._where, between)


def _code(refusal: Exception) -> str:
    """DENIED, MISCONF: the first word, which names it; the rest may quote what was sent. OOM has a class."""
    word = str(refusal).partition(" ")[0]
    return word if word.isupper() else type(refusal).__name__
