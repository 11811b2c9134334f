"""A connection that waits for its next request: the replica may end it, or say more than its answer, at any time."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from gateway.connecting import connect
from gateway.http1 import UpstreamConnection
from gateway.upstream import Pool

STRAY = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"


def says_more(sock: socket.socket) -> None:
    sock.sendall(STRAY)


def ends(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


def resets(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@contextmanager
def listening() -> Iterator[socket.socket]:
    with ExitStack() as held:
        server = held.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


async def idle(pool: Pool, server: socket.socket) -> tuple[UpstreamConnection, socket.socket]:
    """A connection that waits in the pool, and the replica's side of it."""
    connection = await connect(pool)
    pool.give(connection)
    return connection, server.accept()[0]


def until_it_is_here(connection: UpstreamConnection) -> None:
    """Stands still until the kernel has it: the loop reads nothing meanwhile."""
    fd = connection.transport.get_extra_info("socket").fileno()
    here = select.poll()
    here.register(fd, select.POLLIN)
    assert here.poll(60_000)


@pytest.mark.parametrize("spoil", [says_more, ends, resets])
async def test_what_came_while_it_waited_is_no_answer_to_the_next_request(
    spoil: Callable[[socket.socket], None],
) -> None:
    with listening() as server:
        pool = Pool(f"http://127.0.0.1:{server.getsockname()[1]}", idle_s=600.0)
        good, its_end = await idle(pool, server)
        spoilt, the_other = await idle(pool, server)
        with its_end, the_other:
            spoil(the_other)
            until_it_is_here(spoilt)
            assert pool.take() is good  # though it has waited longer
            assert spoilt.closed
            assert not good.closed
            assert pool.take() is None
            assert pool.stats.open == 1
            pool.give(good)
            pool.close()


async def test_a_connection_that_was_not_needed_waits_for_the_next_request() -> None:
    with listening() as server:
        pool = Pool(f"http://127.0.0.1:{server.getsockname()[1]}", idle_s=600.0)
        connection, other = await idle(pool, server)
        with other:
            assert connection.idle_since > 0.0  # it is as young as any
            assert pool.take() is connection
            connection.close()
