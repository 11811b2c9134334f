"""What the gateway itself asks a replica for: whole pages within their time, or a reason in words."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from pathlib import Path

import pytest

from gateway import fetch, probe, scrape
from gateway.fetch import Fetcher, FetchError, FetchTimeoutError
from gateway.replica import Replica
from gateway.signals import Sign
from tests.files import no_more_files
from tests.gateway.scripted import Connection, Script, ScriptedReplica, Seen, playing, replica, until
from tests.gateway.test_proxy import certificate

PAGE = b"vllm:num_requests_running 3\n"
AS_LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(PAGE), PAGE)
AS_CHUNKS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(
    b"%x\r\n%b\r\n" % (len(part), part) for part in (PAGE[:3], PAGE[3:])
)
LAST_CHUNK = b"0\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + PAGE


def fetcher(of: ScriptedReplica, prefix: str = "", key: str | None = None) -> Fetcher:
    return Fetcher(Replica("r0", f"http://127.0.0.1:{of.port}{prefix}", key=key))


@pytest.mark.parametrize(
    ("reads", "connections"),
    [
        ([AS_LENGTH], 1),
        ([AS_LENGTH[:9], AS_LENGTH[9:-4], AS_LENGTH[-4:]], 1),
        ([AS_CHUNKS + LAST_CHUNK], 1),
        ([AS_CHUNKS[:60], AS_CHUNKS[60:], LAST_CHUNK], 1),
        ([UNTIL_CLOSE[:-5], UNTIL_CLOSE[-5:]], 2),
    ],
)
async def test_a_page_is_had_however_it_is_delimited_and_the_connection_serves_again(
    reads: list[bytes], connections: int
) -> None:
    async with replica(playing(reads)) as a:
        asked = fetcher(a)
        assert [await asked.fetch("/metrics", 60.0) for _ in range(2)] == [(200, PAGE), (200, PAGE)]
        assert a.connections == connections
        asked.close()


async def test_a_request_says_where_who_and_what() -> None:
    async with replica(playing([AS_LENGTH])) as a:
        asked = fetcher(a, "/gpu", "geheim")
        await asked.fetch("/health", 60.0)
        await asked.fetch("/v1/completions", 60.0, {"max_tokens": 1})
        asked.close()
        host = b"host: 127.0.0.1:%d\r\nuser-agent: forebay\r\naccept: */*\r\naccept-encoding: identity\r\n" % a.port
        host += b"authorization: Bearer geheim\r\n"
        assert [(one.head, one.body) for one in a.seen] == [
            (b"GET /gpu/health HTTP/1.1\r\n" + host + b"\r\n", b""),
            (
                b"POST /gpu/v1/completions HTTP/1.1\r\n"
                + host
                + b"content-type: application/json\r\ncontent-length: 16\r\n\r\n",
                b'{"max_tokens":1}',
            ),
        ]


def endless(part: bytes, stalls: bool) -> Script:
    async def script(connection: Connection, request: Seen) -> None:
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\n", part)
        while not stalls:
            await connection.send(part)
        await connection.peer_left()

    return script


@pytest.mark.parametrize(("stalls", "said"), [(True, "took longer than 0.2 s"), (False, "is larger than 16777216")])
async def test_a_page_that_never_ends_is_given_up_and_its_connection_closed(stalls: bool, said: str) -> None:
    async with replica(endless(b"x" * (1 << 20), stalls)) as a:
        asked = fetcher(a)
        with pytest.raises(scrape.ReadError, match=f"^/metrics .*{said}"):
            await scrape.metrics(asked, "r0", 0.2 if stalls else 60.0, lambda: 1.0)
        await until(lambda: not a.writers)
        asked.close()


async def test_a_head_that_trickles_is_given_up() -> None:
    async def trickle(connection: Connection, request: Seen) -> None:
        await connection.send(b"HTTP/1.1 200 OK\r\nx: ")
        while not connection.writer.is_closing():
            await connection.send(b"x")
            await asyncio.sleep(0.01)

    async with replica(trickle) as a:
        with pytest.raises(FetchTimeoutError, match=r"^took longer than 0\.2 s$"):
            await fetcher(a).fetch("/health", 0.2)


async def test_a_replica_is_not_blamed_for_the_time_in_which_the_gateway_itself_stood_still() -> None:
    async def stop_everything(connection: Connection, request: Seen) -> None:
        time.sleep(0.6)  # noqa: ASYNC251  # the loop of both ends
        await connection.send(AS_LENGTH[:9])
        await asyncio.sleep(0.05)
        await connection.send(AS_LENGTH[9:])

    async with replica(stop_everything) as a:
        asked = fetcher(a)
        assert await asked.fetch("/metrics", 0.2) == (200, PAGE)
        asked.close()


@pytest.mark.parametrize("charset", ["hex", "undefined", "utf-16", "nothing-known"])
async def test_a_page_is_read_whatever_its_charset_is_called(charset: str) -> None:
    page = PAGE + b"\xff\xfe"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; charset=%b\r\ncontent-length: %d\r\n\r\n"
    async with replica(playing([head % (charset.encode(), len(page)), page])) as a:
        asked = fetcher(a)
        assert (await scrape.metrics(asked, "r0", 60.0, lambda: 1.0)).running == 3.0
        asked.close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "could not be read: what it sent is no HTTP answer"),
        (AS_CHUNKS + b"zz\r\n", "could not be read: what it sent is no HTTP answer"),
        (AS_LENGTH[:-4], "could not be read: the connection broke off"),
        (AS_CHUNKS, "could not be read: the connection broke off"),
        (b"", "could not be read: the connection broke off"),
    ],
)
async def test_an_answer_that_breaks_off_or_is_none_says_so(answer: bytes, said: str) -> None:
    async def script(connection: Connection, request: Seen) -> None:
        await connection.send(answer)
        connection.writer.close()

    async with replica(script) as a:
        asked = fetcher(a)
        with pytest.raises(FetchError, match=f"^{said}$") as failed:
            await asked.fetch("/metrics", 60.0)
        assert failed.value.sign is Sign.PROBE_FAILED


async def test_a_connection_that_was_closed_while_idle_costs_no_answer() -> None:
    """vLLM drops idle connections; the request that meets such a one is asked once more on a new one."""
    served = 0

    async def once(connection: Connection, request: Seen) -> None:
        nonlocal served
        served += 1
        if served == 2:
            connection.writer.close()  # the request reaches a connection that is closing
        else:
            await connection.send(AS_LENGTH)

    async with replica(once) as a:
        asked = fetcher(a)
        assert [await asked.fetch("/metrics", 60.0) for _ in range(2)] == [(200, PAGE), (200, PAGE)]
        assert (served, a.connections) == (3, 2)
        asked.close()


async def test_a_replica_that_moved_is_asked_where_it_is() -> None:
    async with replica(playing([AS_LENGTH])) as before, replica(playing([AS_LENGTH])) as after:
        moving = Replica("r0", f"http://127.0.0.1:{before.port}")
        asked = Fetcher(moving)
        await asked.fetch("/health", 60.0)
        moving.url = f"http://127.0.0.1:{after.port}"
        await asked.fetch("/health", 60.0)
        asked.close()
        assert (len(before.seen), len(after.seen)) == (1, 1)
        await until(lambda: not before.writers)


async def test_signs_of_a_replica_that_cannot_be_asked(tmp_path: Path) -> None:
    """Nobody listens; a certificate that is not trusted; a server that never says a word; one that hangs up."""
    async with replica(playing([AS_LENGTH])) as gone:
        nobody = fetcher(gone)
    assert await probe.health(nobody, 60.0) is Sign.REFUSED

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key, cert = certificate(tmp_path)
    context.load_cert_chain(cert, key)
    async with replica(playing([AS_LENGTH]), ssl=context) as secured:
        url = f"https://127.0.0.1:{secured.port}"
        assert await probe.health(Fetcher(Replica("r0", url)), 60.0) is Sign.TLS
        trusted = Fetcher(Replica("r0", url, ca_file=str(cert)))
        assert await probe.health(trusted, 60.0) is None
        trusted.close()

    async with replica(endless(b"", stalls=True)) as silent:
        assert await probe.health(fetcher(silent), 0.2) is Sign.PROBE_LATE
        one = Replica("r0", f"http://127.0.0.1:{silent.port}")
        assert await probe.token(Fetcher(one), one, 0.2) is Sign.FIRST_EVENT_TIMEOUT


async def test_a_gateway_that_may_open_no_more_files_learns_nothing_about_a_replica() -> None:
    async with replica(playing([AS_LENGTH])) as a:
        asked = fetcher(a)
        with no_more_files(os.getpid()):
            with pytest.raises(FetchError, match=r"^could not be read: .*Too many open files"):
                await asked.fetch("/metrics", 60.0)
            assert await probe.health(asked, 60.0) is Sign.OURS
        assert await probe.health(asked, 60.0) is None
        asked.close()


async def test_whoever_stops_asking_leaves_no_connection_behind() -> None:
    async with replica(endless(b"", stalls=True)) as a:
        asking = asyncio.create_task(fetcher(a).fetch("/health", 60.0))
        await until(lambda: a.seen)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: not a.writers)


def test_the_bound_of_an_answer_is_far_above_any_page() -> None:
    assert fetch.MOST_BYTES == 16 * 2**20
