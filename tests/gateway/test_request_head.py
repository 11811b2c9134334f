"""A head that was accepted once is known again with any length, and in no other case."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.request_head import learn
from tests.gateway.scripted import Connection, Seen, gateway, replica
from tests.gateway.test_failures import WHOLE, whole

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nX-A: b\r\n\r\n"
)


def request(body: bytes, head: bytes = HEAD) -> bytes:
    return head % len(body) + body


def scope(*headers: tuple[bytes, bytes], version: str = "1.1") -> dict[str, Any]:
    given = [(b"host", b"g"), *headers, (b"content-length", b"5")]
    return {"http_version": version, "headers": given, "path": "/v1/completions"}


def test_the_same_head_with_another_length_is_known() -> None:
    known = learn(request(b"12345"), scope())
    assert known is not None
    for body in (b"1", b"12345", b"x" * 70_000):
        data = request(body)
        assert known.begins(data) == (len(data) - len(body), 0)
    assert known.first[b"host"] == b"g"


@pytest.mark.parametrize(
    "data",
    [
        request(b"12345").replace(b"X-A: b", b"X-A: c"),
        request(b"12345").replace(b"Length: 5", b"Length: +5"),
        request(b"12345").replace(b"Length: 5", b"Length: 5 "),
        request(b"12345").replace(b"Length: 5", b"Length: 0x5"),
        request(b"12345").replace(b"Length: 5", b"Length:  5"),
        request(b"12345").replace(b"Length: 5", b"Length: "),
        request(b"12345").replace(b"\r\nX-A", b"\r\nTransfer-Encoding: chunked\r\nX-A"),
        request(b"12345").replace(b"POST", b"PUT"),
        b"",
    ],
)
def test_whatever_differs_is_for_the_parser(data: bytes) -> None:
    known = learn(request(b"12345"), scope())
    assert known is not None
    assert known.begins(data) is None


def test_it_says_how_much_of_the_body_is_missing() -> None:
    known = learn(request(b"12345")[:-2], scope())  # a head is learnt before its body is there
    assert known is not None
    at = len(HEAD) - 1
    assert known.begins(request(b"12345")[:-2]) == (at, 2)
    assert known.begins(request(b"12345") + b"POST") == (at, -4)  # of another request


@pytest.mark.parametrize(
    ("headers", "data"),
    [
        ([(b"transfer-encoding", b"chunked")], request(b"12345")),
        ([(b"expect", b"100-continue")], request(b"12345")),
        ([(b"connection", b"close")], request(b"12345")),
        ([(b"upgrade", b"h2c")], request(b"12345")),
        ([], request(b"12345").replace(b"X-A: b", b"Content-Length: 5")),
        ([], request(b"12345") + b"POST"),
    ],
)
def test_unusual_requests_give_no_template(headers: list[tuple[bytes, bytes]], data: bytes) -> None:
    assert learn(data, scope(*headers)) is None


def test_official_clients_keep_their_connection_alive_and_are_known() -> None:
    assert learn(request(b"12345"), scope((b"connection", b"keep-alive"))) is not None
    assert learn(request(b"12345"), scope(version="1.0")) is None


async def test_requests_of_one_connection_keep_their_own_body_and_id() -> None:
    async def echo(connection: Connection, seen: Seen) -> None:
        await connection.send(whole(b"200 OK", seen.body))

    async with replica(echo) as a, gateway(a) as g:
        client = await g.connect()
        bodies = [WHOLE.replace(b"}", b',"n":%d}' % 10**digits) for digits in range(6)]
        for body in bodies:
            await client.send(request(body))
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, body)
        client.close()
    assert [seen.body for seen in a.seen] == bodies
    assert [seen.header(b"content-length") for seen in a.seen] == [b"%d" % len(body) for body in bodies]
    assert len({seen.header(b"x-request-id") for seen in a.seen}) == len(bodies)
    assert {seen.header(b"x-a") for seen in a.seen} == {b"b"}
