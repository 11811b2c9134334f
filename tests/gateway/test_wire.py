"""What clients may send: several requests ahead, old HTTP, upgrades, too much, too slowly, or smuggled."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from gateway.cycle import SplicedCycle
from tests.gateway.scripted import CHAT, Connection, Seen, dechunk, gateway, playing, replica, until
from tests.gateway.test_failures import GOOD_STREAM, GOOD_WHOLE, WHOLE, whole

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"


async def echo(connection: Connection, request: Seen) -> None:
    await connection.send(whole(b"200 OK", request.body))


SMUGGLED = {
    "length and chunked": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
    "signed length": HEAD + b"Content-Length: +5\r\n\r\n12345",
    "folded header": HEAD + b"X: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "space before colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "chunked is not last": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "bad chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "bare LF in chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\nabc\n0\n\n",
    "bare LF in head": b"POST /v1/completions HTTP/1.1\nHost: g\nContent-Length: 0\n\n",
    "chunked in HTTP/1.0": b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("shape", SMUGGLED)
async def test_ambiguous_requests_are_refused_and_the_connection_closed(shape: str) -> None:
    async with replica(echo) as a, gateway(a) as g:
        client = await g.connect()
        await client.send(SMUGGLED[shape] + HEAD + b"Content-Length: 29\r\n\r\n" + WHOLE)
        answer = await client.answer()
        assert answer.status == 400
        assert answer.header("connection") == "close"
        assert orjson.loads(answer.body)["error"]["code"] == "malformed"
        assert await client.closed() == b""
        assert a.seen == []


async def test_a_connection_that_never_sends_a_byte_is_closed_when_it_was_idle_for_long_enough() -> None:
    async with replica(echo) as a, gateway(a) as g:
        client = await g.connect()
        await until(lambda: g.protocols and g.protocols[0].transport is not None)
        idle = g.protocols[0]
        assert idle._idle_timer is not None
        idle._look_idle()  # too early
        assert not idle.transport.is_closing()
        idle._idle_since -= idle.timeout_keep_alive
        idle._look_idle()
        assert await client.closed() == b""


@pytest.mark.parametrize("spliced", [True, False])
async def test_an_answer_without_a_body_has_no_length(spliced: bool) -> None:
    nothing = b"HTTP/1.1 204 No Content\r\nx-a: b\r\n\r\n"
    async with replica(playing([nothing])) as a, gateway(a, spliced=spliced) as g:
        client = await g.connect()
        for _ in range(2):  # the connection goes on
            await client.send(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(WHOLE), WHOLE))
            answer = await client.answer(head_only=True)
            assert (answer.status, answer.header("x-a"), answer.header("content-length")) == (204, "b", None)
        client.close()


async def test_an_event_stream_is_known_in_any_spelling() -> None:
    head = GOOD_STREAM[0].replace(b"text/event-stream", b"Text/Event-Stream")
    async with replica(playing([head, *GOOD_STREAM[1:]])) as a, gateway(a) as g:
        answer = await g.post("/v1/completions", WHOLE.replace(b"{", b'{"stream":true,', 1))
        assert answer.body == dechunk(b"".join(GOOD_STREAM[1:]))
        assert (await g.record()).content_events == 2


async def test_requests_sent_ahead_are_answered_in_order() -> None:
    async with replica(echo) as a, gateway(a) as g:
        client = await g.connect()
        bodies = [b'{"model":"tiny","prompt":"%d"}' % i for i in range(20)]
        await client.send(b"".join(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(b), b) for b in bodies))
        assert [(await client.answer()).body for _ in bodies] == bodies
        client.close()


async def test_streams_sent_ahead_are_answered_in_order() -> None:
    async with replica(playing(GOOD_STREAM)) as a, gateway(a) as g:
        client = await g.connect()
        await client.post("/v1/chat/completions", CHAT)
        await client.post("/v1/chat/completions", CHAT)
        for _ in range(2):
            assert (await client.answer()).body == dechunk(b"".join(GOOD_STREAM[1:]))
        client.close()


async def test_http_1_0_gets_an_unframed_stream_and_a_close() -> None:
    async with replica(playing(GOOD_STREAM)) as a, gateway(a) as g:
        client = await g.connect()
        await client.send(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(CHAT), CHAT))
        answer = await client.answer()
        assert answer.header("transfer-encoding") is None
        assert answer.header("connection") == "close"
        assert answer.body == dechunk(b"".join(GOOD_STREAM[1:]))
        assert a.seen[0].line == b"POST /v1/chat/completions HTTP/1.1"


async def test_websocket_upgrade_gets_426() -> None:
    async with replica(echo) as a, gateway(a) as g:
        client = await g.connect()
        await client.send(
            b"GET /v1/responses/x HTTP/1.1\r\nHost: g\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        answer = await client.answer()
        assert (answer.status, answer.header("upgrade")) == (426, "HTTP/1.1")
        assert a.seen == []


async def test_h2c_upgrade_is_ignored() -> None:
    """Java's client offers it with every request."""
    async with replica(echo) as a, gateway(a) as g:
        client = await g.connect()
        offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        for cut in (0, 40, 200):
            message = HEAD + offer + b"Content-Length: 29\r\n\r\n" + WHOLE
            await client.send(message[:cut])
            await asyncio.sleep(0)
            await client.send(message[cut:])
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, WHOLE)
        assert a.seen[0].header(b"upgrade") is None
        assert a.seen[0].header(b"http2-settings") is None
        client.close()


async def test_expect_100_continue() -> None:
    async with replica(echo) as a, gateway(a, settings="limits.max_body_bytes = 100") as g:
        client = await g.connect()
        await client.send(HEAD + b"Expect: 100-continue\r\nContent-Length: 29\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(WHOLE)
        assert (await client.answer()).body == WHOLE
        assert a.seen[0].header(b"expect") is None
        await client.send(HEAD + b"Expect: 100-continue\r\nContent-Length: 101\r\n\r\n")
        assert (await client.answer()).status == 413


async def test_chunked_request_body_is_forwarded_whole() -> None:
    async with replica(echo) as a, gateway(a) as g:
        client = await g.connect()
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for byte in WHOLE:
            await client.send(b"1\r\n%c\r\n" % byte)
        await client.send(b"0\r\nX-Trailer: 1\r\n\r\n")
        assert (await client.answer()).body == WHOLE
        assert a.seen[0].header(b"content-length") == b"29"
        assert a.seen[0].header(b"x-trailer") is None
        client.close()


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_body_over_the_limit_is_413(framing: str, path: str) -> None:
    async with replica(echo) as a, gateway(a, settings="limits.max_body_bytes = 1000") as g:
        client = await g.connect()
        head = b"POST %b HTTP/1.1\r\nHost: g\r\n" % path.encode()
        if framing == "length":
            await client.send(head + b"Content-Length: 1001\r\n\r\n" + b" " * 1001)
        else:
            await client.send(head + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(11):
                await client.send(b"64\r\n" + b" " * 100 + b"\r\n")
        answer = await client.answer()
        assert answer.status == 413
        error = orjson.loads(answer.body)["error"]
        assert (error["code"], "1000 bytes" in error["message"]) == ("too_large", True)
        assert (error["type"] == "request_too_large") == (path == "/v1/messages")
        assert a.seen == []
        client.close()


async def test_body_at_the_limit_passes() -> None:
    body = b'{"model":"tiny","prompt":"' + b"x" * (2_000_000 - 28) + b'"}'
    async with replica(echo) as a, gateway(a, settings="limits.max_body_bytes = 2000000") as g:
        answer = await g.post("/v1/completions", body)
        assert (answer.status, len(answer.body)) == (200, 2_000_000)
        assert a.seen[0].body == body


async def test_large_answers_are_passed_on_as_they_come() -> None:
    big = b'{"data":"' + b"x" * 1_000_000 + b'"}'
    async with replica(playing([whole(b"200 OK", big)])) as a, gateway(a) as g:
        for path in ("/v1/embeddings", "/v1/completions"):
            answer = await g.post(path, WHOLE)
            assert (answer.status, answer.body) == (200, big)


@pytest.mark.parametrize("cut", [0, 5000])
async def test_headers_over_the_limit_are_431(cut: int) -> None:
    async with replica(echo) as a, gateway(a, settings="limits.max_header_bytes = 4096") as g:
        client = await g.connect()
        message = HEAD + b"X-Big: " + b"x" * 5000 + b"\r\nContent-Length: 29\r\n\r\n" + WHOLE
        await client.send(message[:cut] if cut else message)
        answer = await client.answer()
        assert answer.status == 431
        assert orjson.loads(answer.body)["error"]["code"] == "headers_too_large"
        assert a.seen == []


async def test_headers_under_the_limit_pass_on_every_request_of_a_connection() -> None:
    async with replica(echo) as a, gateway(a, settings="limits.max_header_bytes = 4096") as g:
        client = await g.connect()
        for _ in range(3):
            await client.post("/v1/completions", WHOLE, "X-Big: " + "x" * 3000 + "\r\n")
            assert (await client.answer()).status == 200
        body = b'{"model":"tiny","prompt":"' + b"x" * 50_000 + b'"}'
        await client.post("/v1/completions", body)
        assert (await client.answer()).body == body
        client.close()


async def test_slow_body_is_408_in_the_apis_own_form() -> None:
    async with replica(echo) as a, gateway(a, settings="limits.body_timeout_s = 0.1") as g:
        client = await g.connect()
        await client.send(b"POST /v1/messages HTTP/1.1\r\nHost: g\r\nContent-Length: 29\r\n\r\nhalf")
        answer = await client.answer()
        assert answer.status == 408
        assert orjson.loads(answer.body)["error"]["type"] == "timeout_error"
        assert a.seen == []


async def test_slow_head_is_408() -> None:
    async with replica(echo) as a, gateway(a, settings="limits.body_timeout_s = 0.1") as g:
        client = await g.connect()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost:")
        assert (await client.answer()).status == 408
        assert await client.closed() == b""


async def test_paths_and_methods_outside_the_table() -> None:
    async with replica(echo) as a, gateway(a) as g:
        for path in (
            "/sleep",
            "/v1/load_lora_adapter",
            "/collective_rpc",
            "/v1/completions/",
            "/v1/responses/a/b",
            "/",
        ):
            answer = await g.post(path, WHOLE)
            assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (404, "unknown_path"), path
        client = await g.connect()
        await client.send(b"GET /v1/completions HTTP/1.1\r\nHost: g\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.header("allow")) == (405, "POST, OPTIONS")
        client.close()
        assert a.seen == []


async def test_options_goes_to_a_replica_and_head_keeps_its_length() -> None:
    async def script(connection: Connection, request: Seen) -> None:
        if request.line.startswith(b"HEAD"):
            await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1234\r\n\r\n")
        else:
            await connection.send(b"HTTP/1.1 200 OK\r\naccess-control-allow-origin: *\r\ncontent-length: 0\r\n\r\n")

    async with replica(script) as a, gateway(a) as g:
        client = await g.connect()
        await client.send(b"OPTIONS /v1/completions HTTP/1.1\r\nHost: g\r\nOrigin: x\r\n\r\n")
        assert (await client.answer()).header("access-control-allow-origin") == "*"
        await client.send(b"HEAD /v1/responses/resp_1 HTTP/1.1\r\nHost: g\r\n\r\n")
        assert (await client.answer(head_only=True)).header("content-length") == "1234"
        await client.send(b"HEAD /v1/models HTTP/1.1\r\nHost: g\r\n\r\n")
        assert (await client.answer(head_only=True)).status == 200
        await client.post("/v1/completions", WHOLE)  # the connection is still in step
        assert (await client.answer(head_only=True)).status == 200
        client.close()
        assert [s.line.split()[0] for s in a.seen] == [b"OPTIONS", b"HEAD", b"POST"]


async def test_a_client_that_asks_to_close_gets_closed() -> None:
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        client = await g.connect()
        await client.post("/v1/completions", WHOLE, "Connection: close\r\n")
        answer = await client.answer()
        assert answer.header("connection") == "close"
        assert await client.closed() == b""
        assert a.seen[0].header(b"connection") is None


@pytest.mark.plain
def test_a_write_to_a_client_that_just_left_is_nobodys_trouble() -> None:
    """The loop may run a timer between the end of a connection and the news of it."""

    class Gone:
        def is_closing(self) -> bool:
            return True

        def write(self, data: bytes) -> None:
            raise RuntimeError("the handler is closed")

    cycle = object.__new__(SplicedCycle)
    cycle.transport = Gone()  # type: ignore[assignment]
    cycle.write(b": keep-alive\n\n")
