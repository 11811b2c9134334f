"""A client that leaves frees the replica at once, in whatever phase; a client that stops reading stops the replica."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.gateway.scripted import CHAT, Connection, Gateway, Seen, gateway, playing, replica, until
from tests.gateway.test_failures import DONE, GOOD_WHOLE, STREAM_HEAD, WHOLE, event

KINDS = pytest.mark.parametrize("spliced", [True, False], ids=["spliced", "asgi"])


class Watched:
    """A replica that says when it got a request, and when the gateway closed the connection."""

    def __init__(self, *first: bytes) -> None:
        self.first = first
        self.got = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, connection: Connection, request: Seen) -> None:
        await connection.send(*self.first)
        self.got.set()
        await connection.peer_left()
        self.left.set()


async def leaves(g: Gateway, watched: Watched, body: bytes, until: bytes = b"") -> None:
    """Posts, waits until the replica is at work, leaves; returns when the replica saw its connection close.

    The tick is switched off: nothing but the departure itself may close it.
    """
    g.scheduler.on_tick = None
    client = await g.connect()
    await client.post("/v1/chat/completions", body)
    await watched.got.wait()
    if until:
        await client.reader.readuntil(until)
    client.close()
    async with asyncio.timeout(60):
        await watched.left.wait()


@KINDS
async def test_before_headers(spliced: bool) -> None:
    watched = Watched()
    async with replica(watched) as a, gateway(a, spliced=spliced) as g:
        await leaves(g, watched, CHAT)
        record = await g.record()
        assert (record.outcome, record.partition, record.status) == ("cancelled", "abandoned", 0)
        assert g.in_flight == 0
        assert g.fleet.health.records["r0"].failed_in_row == 0


@KINDS
async def test_after_a_large_body_that_came_in_one_read(spliced: bool) -> None:
    """Reading was paused for its size before anybody asked for the body; it must go on, or the end is never seen."""
    watched = Watched()
    body = CHAT.replace(b"river", b"river" * 20_000)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with replica(watched) as a, gateway(a, spliced=spliced) as g:
        client = await g.connect()
        await until(lambda: g.protocols and g.protocols[-1].transport is not None)
        g.protocols[-1].data_received(head + body)
        await watched.got.wait()
        client.close()
        assert (await g.record()).outcome == "cancelled"


@KINDS
async def test_after_headers_before_content(spliced: bool) -> None:
    watched = Watched(STREAM_HEAD)
    async with replica(watched) as a, gateway(a, spliced=spliced) as g:
        await leaves(g, watched, CHAT)
        assert (await g.record()).outcome == "cancelled"


@KINDS
async def test_in_mid_stream(spliced: bool) -> None:
    watched = Watched(STREAM_HEAD, event("first"))
    async with replica(watched) as a, gateway(a, spliced=spliced) as g:
        await leaves(g, watched, CHAT, until=b"first")
        record = await g.record()
        assert (record.outcome, record.content_events, record.status) == ("cancelled", 1, 200)
        assert g.in_flight == 0
        assert not g.scheduler.meters["r0"].live


@KINDS
async def test_not_streamed(spliced: bool) -> None:
    watched = Watched()
    async with replica(watched) as a, gateway(a, spliced=spliced) as g:
        await leaves(g, watched, WHOLE)


async def test_a_long_answer_that_has_begun_is_not_taken_back() -> None:
    """A batch request makes way for others until its first byte; after that it would be lost, not moved."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
    go_on, begun = asyncio.Event(), Watched(head, b"x" * 400_000)

    async def script(connection: Connection, request: Seen) -> None:
        await go_on.wait()
        await begun(connection, request)

    async with replica(script) as a, gateway(a) as g:
        client = await g.connect()
        await client.post("/v1/completions", WHOLE, "x-service-class: batch\r\n")
        core = g.scheduler.balancer.fleet.replicas["r0"]
        await until(lambda: g.in_flight == 1)
        assert len(core.fill) == 1
        go_on.set()
        await client.head()
        assert core.fill == {}
        client.close()
        assert (await g.record()).outcome == "cancelled"
        assert g.in_flight == core.ledger.live_decodes == 0


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/models", "/v1/completions"])
async def test_when_the_connection_breaks_before_we_answer_nobody_is_blamed(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The transport is closing already and the loop has not told us yet: there is nobody to answer."""
    server_log = logging.getLogger("uvicorn.error")
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        caplog.set_level(logging.ERROR, "uvicorn.error")
        server_log.addHandler(caplog.handler)
        try:
            for _ in range(20):
                client = await g.connect()
                await until(lambda: g.protocols and g.protocols[-1].transport is not None)
                protocol = g.protocols.pop()
                method = "POST" if path == "/v1/completions" else "GET"
                body = b"{" if method == "POST" else b""
                protocol.data_received(
                    f"{method} {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
                )
                protocol.transport.abort()
                await until(lambda: not protocol.tasks)  # noqa: B023
                client.close()
        finally:
            server_log.removeHandler(caplog.handler)
        assert caplog.text == ""


async def test_a_half_close_is_a_departure() -> None:
    watched = Watched(STREAM_HEAD, event("first"))
    async with replica(watched) as a, gateway(a) as g:
        client = await g.connect()
        await client.post("/v1/chat/completions", CHAT)
        await watched.got.wait()
        client.writer.write_eof()
        async with asyncio.timeout(60):
            await watched.left.wait()
        client.close()


async def test_while_the_body_is_being_sent() -> None:
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        client = await g.connect()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 100\r\n\r\nhalf")
        await until(lambda: g.protocols and g.protocols[-1].serving is not None)
        client.close()
        assert (await g.record()).outcome == "cancelled"
        assert a.seen == []


async def test_while_sent_ahead_requests_wait() -> None:
    """The next request of a pipelining client must not hide that it has left."""
    watched = Watched(STREAM_HEAD, event("first"))
    async with replica(watched) as a, gateway(a) as g:
        client = await g.connect()
        await client.post("/v1/chat/completions", CHAT)
        await client.post("/v1/chat/completions", CHAT)
        await client.reader.readuntil(b"first")
        client.close()
        async with asyncio.timeout(60):
            await watched.left.wait()
        assert len(a.seen) == 1


@KINDS
async def test_a_client_that_stops_reading_stops_the_replica(spliced: bool) -> None:
    """The replica can write no more than sockets and our bounded buffers hold; all of it arrives once it reads."""
    sent = 0
    total = 24 * 1024 * 1024  # the two sockets on the way may grow to 4 MiB each (net.ipv4.tcp_wmem)
    text = "x" * 8000

    async def flood(connection: Connection, request: Seen) -> None:
        nonlocal sent
        await connection.send(STREAM_HEAD)
        while sent < total:
            await connection.send(event(text))
            sent += len(text)
        await connection.send(event("", "stop"), DONE)

    async with replica(flood) as a, gateway(a, spliced=spliced) as g:
        client = await g.connect(receive_buffer=65536)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.post("/v1/chat/completions", CHAT)

        def stopped() -> bool:
            """Nothing is read any more, and the replica would not be blamed for that however long it lasts."""
            exchange = next(iter(g.proxy.live), None)
            relay = None if exchange is None else exchange.relay
            if exchange is None or exchange.admission is None or relay is None or relay.connection is None:
                return False
            if not (exchange.client.paused and relay.connection._paused):
                return False
            assert g.proxy.overdue(relay, exchange.admission, exchange.client.paused, relay.last_sign_at + 1e6) is None
            return True

        await until(lambda: sent >= total or stopped(), 60.0)
        assert sent < total
        held = g.protocols[-1].transport.get_write_buffer_size()
        assert held < 256 * 1024
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.answer()
        assert answer.body.count(text.encode()) == total // len(text) + 1
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert (await g.record()).outcome == "success"
        client.close()
