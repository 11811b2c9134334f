"""The connection to Redis (or Valkey): every call has a deadline, and none is made while it is known to be away.

One call in the background, the registers' every tenth of a second, is the probe: when it fails Redis is down and nobody
else asks, when it succeeds again Redis is up. So a request never waits for a Redis that is gone, and recovery needs
nobody. After a failure connections are made anew, which follows an address that moved in a failover. Calls are batches
without a transaction; a command that Redis refuses (full, read-only) fails alone, as a value.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.shared.table import RedisTable

Command = Sequence[Any]
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
        self._said: bool | None = None
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
            await self._down("no answer in time" if late else type(error).__name__)
            return None
        refused = next((a for a in answers if isinstance(a, Exception)), None)
        self.calls[name, "ok" if refused is None else "refused"] += 1
        if isinstance(refused, exceptions.ReadOnlyError):
            await self._down("it is a replica now")  # a failover: connect to whoever has the address
            return None
        if probe:
            self._is_up()
        return answers

    async def close(self) -> None:
        self.up = False
        await self._redis.aclose()

    def _is_up(self) -> None:
        self.up = True
        if self._said is not True:
            log.info("redis %s: answers", self.where)
            self._said = True

    async def _down(self, why: str) -> None:
        if self.up or self._said is None:
            log.warning("redis %s: %s; going on with what this gateway knows alone", self.where, why)
            self._said = False
        self.up = False
        await self._redis.connection_pool.disconnect(inuse_connections=False)
