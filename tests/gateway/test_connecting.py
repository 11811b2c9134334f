"""Connections to replicas that are too busy to accept, or that the gateway itself is late for."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from gateway import connecting
from gateway.connecting import ConnectError, connect
from gateway.http1 import Break
from gateway.upstream import Pool
from tests.gateway.scripted import Connection, Seen, gateway, playing, replica, until
from tests.gateway.test_failures import GOOD_WHOLE, WHOLE, whole

SHORT = "[timeouts]\nconnect_s = 0.05\n[retry]\nbudget_per_s = 1000.0\n"


@contextmanager
def full_queue(address: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """The URL of a replica that is too busy to accept: the kernel's queue for it is full, so more have to wait."""
    with ExitStack() as held:
        listening = held.enter_context(socket.socket())
        listening.bind((address, port))
        listening.listen(0)
        held.enter_context(socket.create_connection(listening.getsockname()))
        select.select([listening], [], [])  # that one is in the queue, which has room for one
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


async def test_replicas_that_are_too_busy_to_accept_are_not_all_ejected() -> None:
    """Nobody refused anything: with the last one gone everybody would be told that there is no replica."""
    with full_queue() as a, full_queue() as b:
        async with gateway(a, b, settings=SHORT) as g:
            for _ in range(8):
                assert (await g.post("/v1/completions", WHOLE)).status == 502
            assert {attempt.detail for record in g.records for attempt in record.attempts} == {"connect_timeout"}
            assert [g.fleet.available(r) for r in ("r0", "r1")].count(True) == 1


async def test_a_500_of_a_replica_that_is_too_busy_for_a_second_connection_is_no_dead_engine() -> None:
    async def filling(connection: Connection, request: Seen) -> None:
        g.proxy._pools["r0"].port = int(full.rpartition(":")[2])
        await connection.send(whole(b"500 Internal Server Error", b'{"error":{"message":"odd request"}}'))

    with full_queue() as full:
        async with replica(filling) as a, gateway(a, settings=SHORT) as g:
            assert (await g.post("/v1/completions", WHOLE)).status == 500
            assert g.fleet.available("r0")


async def test_a_replica_is_not_blamed_for_a_connection_that_the_gateway_itself_was_late_for() -> None:
    async with replica(playing(GOOD_WHOLE)) as a:
        connecting = asyncio.create_task(connect(Pool(f"http://127.0.0.1:{a.port}", connect_timeout_s=0.2)))
        asyncio.get_running_loop().call_soon(time.sleep, 0.6)  # once the kernel has been asked
        (await connecting).close()


@pytest.mark.parametrize(
    ("said", "kind"), [(socket.EAI_AGAIN, Break.CONNECT_TIMEOUT), (socket.EAI_NONAME, Break.REFUSED)]
)
async def test_a_name_server_that_does_not_answer_says_nothing_about_the_replicas(
    said: int, kind: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a name that does not exist is like a port that is shut."""

    async def unanswered(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(said, "as the resolver says")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unanswered)
    with pytest.raises(ConnectError, match="as the resolver says") as failed:
        await connect(Pool("http://replica.example:8000"))
    assert failed.value.kind is kind


async def test_a_handshake_that_breaks_off_is_no_refusal() -> None:
    async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.transport.abort()

    server = await asyncio.start_server(hangs_up, "127.0.0.1", 0)
    async with server:
        with pytest.raises(ConnectError, match=r"^the connection broke off|^Connection") as failed:
            await connect(Pool(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        assert failed.value.kind is Break.RESET


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives every name these addresses."""

    def name(*addresses: str) -> None:
        async def found(host: str, port: int, **kwargs: object) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)

    return name


def tries() -> list[asyncio.Task[Any]]:
    """Connections on their way."""
    return [task for task in asyncio.all_tasks() if "_open" in repr(task.get_coro())]


async def test_of_a_name_with_several_addresses_one_that_is_alive_is_enough(named: Callable[..., None]) -> None:
    """Nobody is at the first, and the second never says a word."""
    async with replica(playing(GOOD_WHOLE)) as a:
        with full_queue("127.0.0.3", a.port):
            named("127.0.0.2", "127.0.0.3", "127.0.0.1")
            connection = await connect(pool := Pool(f"http://replica.example:{a.port}", connect_timeout_s=60.0))
            assert connection.transport.get_extra_info("peername") == ("127.0.0.1", a.port)
            assert (pool.stats.open, pool.stats.connects, pool.stats.failed_connects) == (1, 1, 0)
            await until(lambda: not tries())
            connection.close()


async def test_a_name_none_of_whose_addresses_is_alive_says_what_the_last_one_said(named: Callable[..., None]) -> None:
    async with replica(playing(GOOD_WHOLE)) as a:  # at another address, so that nobody takes its port
        url = f"http://replica.example:{a.port}"
        named("127.0.0.2", "127.0.0.3")
        with pytest.raises(ConnectError) as refused:
            await connect(Pool(url, connect_timeout_s=60.0))
        assert refused.value.kind is Break.REFUSED
        with full_queue("127.0.0.2", a.port), full_queue("127.0.0.3", a.port):
            with pytest.raises(ConnectError) as late:
                await connect(Pool(url, connect_timeout_s=0.3))
            assert late.value.kind is Break.CONNECT_TIMEOUT
    await until(lambda: not tries())


class Opened:
    """As much of a connection as its being given up needs."""

    closed = False

    def close(self) -> None:
        self.closed = True


async def test_of_two_connections_that_come_at_once_the_other_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Opened] = []
    both = asyncio.Event()

    async def at_once(*_: object) -> Opened:
        made.append(mine := Opened())
        if len(made) == 2:
            asyncio.get_running_loop().call_soon(both.set)
        await both.wait()
        return mine

    monkeypatch.setattr(connecting, "_open", at_once)
    monkeypatch.setattr(connecting, "NEXT_AFTER_S", 0.0)
    won: Any = await connecting._first(Pool("http://replica.example"), ["127.0.0.2", "127.0.0.3"], None)
    assert [one.closed for one in made] == [one is not won for one in made]
    assert won in made
