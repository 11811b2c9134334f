"""Clients that write what no client should, byte by byte: the log stays clean, and a connection ends or works on."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import orjson
import pytest

from gateway.request_head import target
from tests.gateway.scripted import CHAT, Connection, Seen, gateway, playing, replica, until
from tests.gateway.test_failures import GOOD_STREAM, WHOLE, whole

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: g\r\n"


@pytest.fixture(autouse=True)
def clean_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.ERROR] == []


async def echo(connection: Connection, request: Seen) -> None:
    await connection.send(whole(b"200 OK", request.body))


@pytest.mark.parametrize(
    ("line", "path", "query"),
    [
        (b"/v1/models?a=b?c#d", b"/v1/models", b"a=b?c"),
        (b"http://other/v1/models?a=b", b"/v1/models", b"a=b"),
        (b"http://other/v1/models", b"/v1/models", b""),
        (b"http://other?a=b", b"/", b"a=b"),
        (b"http://other", b"/", b""),
        (b"other:443", b"/", b""),
        (b"*", b"*", b""),
    ],
)
def test_whatever_form_a_target_has_it_is_a_path_and_a_query(line: bytes, path: bytes, query: bytes) -> None:
    assert target(line) == (path, query)


async def test_a_target_with_a_host_is_served_like_one_without() -> None:
    async with replica(playing(GOOD_STREAM)) as a, gateway(a) as g:
        answer = await g.post("http://other:80/v1/chat/completions", CHAT)
        assert (answer.status, a.seen[0].line) == (200, b"POST /v1/chat/completions HTTP/1.1")


async def test_a_thousand_upgrades_in_one_read_are_a_thousand_requests() -> None:
    async with replica(echo) as a, gateway(a) as g:
        client = await g.connect()
        await client.send((MODELS + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n") * 1000)
        for _ in range(1000):
            assert (await client.answer()).status == 200
        client.close()


async def test_a_body_that_turns_out_to_be_none_is_answered_once_whatever_its_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with replica(echo) as a, gateway(a) as g:
        of_server = logging.getLogger("uvicorn.error")  # quiet in these tests, and here it is asked
        of_server.setLevel(logging.ERROR)
        of_server.addHandler(caplog.handler)
        client = await g.connect()
        await client.send(b"POST /nothing HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (400, "close")
        assert await client.closed() == b""


async def test_a_body_that_turns_out_to_be_none_after_its_answer_ends_the_connection() -> None:
    async with replica(echo) as a, gateway(a) as g:
        client = await g.connect()
        await client.send(b"POST /nothing HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (404, "close")
        await client.send(b"zz\r\n")
        await until(lambda: g.protocols[0].transport.is_closing())


LARGE = b"GET /v1/models HTTP/1.1\r\nHost: g\r\nX: %b\r\n\r\n" % (b"x" * 5000)
OLD = b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"


@pytest.mark.parametrize(("refused", "status"), [(LARGE, 431), (OLD, 400)])
async def test_what_stands_behind_a_refused_request_in_its_read_is_not_served(refused: bytes, status: int) -> None:
    async with replica(echo) as a, gateway(a, settings="[limits]\nmax_header_bytes = 4096\n") as g:
        client = await g.connect()
        await client.send(HEAD + b"Content-Length: 29\r\n\r\n" + WHOLE)
        assert (await client.answer()).body == WHOLE
        g.protocols[0].data_received(refused + HEAD + b"Content-Length: 29\r\n\r\n" + WHOLE)
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (status, "close")
        assert await client.closed() == b""
        assert len(a.seen) == 1


async def test_a_refusal_of_a_head_request_has_no_body() -> None:
    async with replica(echo) as a, gateway(a) as g:
        client = await g.connect()
        await client.send(b"HEAD /v1/responses/x HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        answer = await client.answer(head_only=True)
        assert (answer.status, answer.header("connection")) == (400, "close")
        assert await client.closed() == b""


async def test_a_head_that_begins_at_the_end_of_a_large_read_is_small() -> None:
    async with replica(echo) as a, gateway(a) as g:
        client = await g.connect()
        await until(lambda: g.protocols and g.protocols[0].transport is not None)
        body = b'{"model":"tiny","prompt":"%b"}' % (b"x" * 70_000)
        g.protocols[0].data_received(HEAD + b"Content-Length: %d\r\n\r\n%b%b" % (len(body), body, HEAD))
        assert (await client.answer()).body == body
        await client.send(b"Content-Length: 29\r\n\r\n" + WHOLE)
        assert (await client.answer()).body == WHOLE


@pytest.mark.parametrize("endless", [b"0\r\nX-Trailer: ", b"0\r\n", b"5;"])
async def test_trailers_and_extensions_of_chunks_are_bounded_like_a_head(endless: bytes) -> None:
    async with replica(echo) as a, gateway(a, settings="[limits]\nmax_header_bytes = 4096\n") as g:
        client = await g.connect()
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + endless)
        for _ in range(3):
            await client.send(b"x" * 2000 + (b": y\r\n" if endless == b"0\r\n" else b""))
        answer = await client.answer()
        assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (431, "headers_too_large")
        assert a.seen == []
