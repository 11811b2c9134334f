"""What the log is told about Redis: each change, and no more lines than somebody reads."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gateway.shared.store import Changes, Store
from gateway.shared.table import RedisTable

AWAY = "ConnectionError; going on with what this gateway knows alone"
FULL = "refuses commands (OutOfMemoryError); it is read as before"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [f"{record.levelname} {record.message}" for record in caplog.records]
    caplog.clear()
    return lines


def test_each_change_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    changes = Changes("10.0.0.5:6379", clock)
    for trouble in ("", "", AWAY, AWAY, AWAY, FULL, FULL, ""):
        clock.now += 0.1
        changes.seen(trouble)
    assert told(caplog) == [
        "INFO redis 10.0.0.5:6379: answers",
        f"WARNING redis 10.0.0.5:6379: {AWAY}",
        f"WARNING redis 10.0.0.5:6379: {FULL}",
        "INFO redis 10.0.0.5:6379: answers",
    ]


def test_one_that_comes_and_goes_is_told_of_six_times_a_minute_and_as_it_is_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    changes = Changes("10.0.0.5:6379", clock)
    for i in range(101):
        clock.now += 0.1
        changes.seen(AWAY if i % 2 else "")
    assert len(told(caplog)) == 6
    clock.now += 60.0
    changes.seen("")
    changes.seen("")
    assert told(caplog) == ["INFO redis 10.0.0.5:6379: answers (94 changes before that are not told)"]


async def test_a_redis_that_lets_nobody_in_is_told_of_by_its_own_word(caplog: pytest.LogCaptureFixture) -> None:
    """One without a password in protected mode says no more than this and hangs up."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"-DENIED Redis is running in protected mode because protected mode is enabled and no password\r\n"
        )
        await writer.drain()
        await reader.read()  # until the other side has read it and closes
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        store = Store(RedisTable(url=f"redis://127.0.0.1:{port}/0", call_s=30.0), {})
        assert await store.call("probe", [("PING",)], probe=True) is None
        await store.close()
    assert told(caplog) == [f"WARNING redis 127.0.0.1:{port}: DENIED; going on with what this gateway knows alone"]
