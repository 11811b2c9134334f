"""A client that takes nothing is let go, and its replica with it; one that is only slow is not."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.stall import Stalls
from tests.gateway.scripted import CHAT, Connection, Seen, gateway, replica, until
from tests.gateway.test_failures import STREAM_HEAD, WHOLE, event, whole

KINDS = pytest.mark.parametrize("spliced", [True, False], ids=["spliced", "asgi"])


class Exchange:
    """As much of one as is looked at."""

    def __init__(self, unsent: int) -> None:
        self.client = SimpleNamespace(unsent=unsent, paused=True)


@pytest.mark.plain
def test_only_who_takes_nothing_for_the_whole_time_has_stalled() -> None:
    stalls, dead, slow, brief = Stalls(), Exchange(1000), Exchange(1000), Exchange(1000)
    every: Any = [dead, slow, brief]
    assert stalls.look(every, 0.0, 10.0) == []
    slow.client.unsent = 999
    assert stalls.look(every, 9.0, 10.0) == []
    brief.client.paused = False  # all taken
    assert stalls.look(every, 10.0, 10.0) == [dead]
    assert stalls.look([slow], 18.9, 10.0) == []  # type: ignore[list-item]
    assert stalls.look([slow], 19.0, 10.0) == [slow]  # type: ignore[list-item, comparison-overlap]
    assert stalls.look([slow], 99.0, None) == []  # type: ignore[list-item]


async def flood(connection: Connection, request: Seen) -> None:
    await connection.send(STREAM_HEAD)
    text = event("x" * 2000)
    while not connection.writer.transport.is_closing():
        await connection.send(text)


@KINDS
async def test_a_stream_that_nobody_reads_ends_and_frees_its_replica(spliced: bool) -> None:
    async with replica(flood) as a, gateway(a, settings="timeouts.client_stall_s = 0.5", spliced=spliced) as g:
        client = await g.connect(receive_buffer=65536)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.post("/v1/chat/completions", CHAT)
        record = await g.record()
        assert (record.outcome, record.partition, record.reason) == ("cancelled", "abandoned", "client_stalled")
        assert (g.in_flight, g.scheduler.open, len(g.proxy.live)) == (0, 0, 0)
        pool = g.proxy.pool("r0")
        assert pool is not None
        assert pool.stats.open == 0
        assert g.fleet.health.records["r0"].failed_in_row == 0
        await until(lambda: not a.writers)  # the replica saw it too
        client.close()


async def test_a_whole_answer_that_nobody_reads_does_not_keep_its_connection() -> None:
    """The request is over, but a part of it waits for a client that asked to be closed and never reads."""
    answer = whole(b"200 OK", b'{"text":"' + b"x" * 200_000 + b'"}')

    async def script(connection: Connection, request: Seen) -> None:
        await connection.send(answer)

    async with replica(script) as a, gateway(a, settings="timeouts.client_stall_s = 0.3") as g:
        client = await g.connect(receive_buffer=4096)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: g.protocols and g.protocols[0].transport is not None)
        transport = g.protocols[0].transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        waits, record = list[int](), g.proxy.sink
        g.proxy.sink = lambda ended: (waits.append(transport.get_write_buffer_size()), record(ended))[1]
        await client.post("/v1/completions", WHOLE, "Connection: close\r\n")
        assert (await g.record()).outcome == "success"
        assert waits[0] > 100_000
        await until(lambda: transport.get_write_buffer_size() == 0)
        client.close()
