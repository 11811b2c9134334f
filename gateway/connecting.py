"""Opening a connection to a replica: the one thing of the pool that waits, and so a coroutine beside it.

A name may have several addresses of which some lead nowhere (a node that is down, IPv6 that a firewall drops): they are
tried as RFC 8305 has it, so that one that is alive is enough.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

from gateway import sockets
from gateway.http1 import Break, UpstreamConnection
from gateway.patience import Patience
from gateway.upstream import Pool

# one read of a stalled stream must stay far below the 256 KiB it may hold; uvloop reads up to 250 KiB at once
RECEIVE_BUFFER_BYTES = 64 * 1024
NEXT_AFTER_S = 0.25  # the next address of a name is tried beside one that has not answered for so long


class ConnectError(Exception):
    """No connection to the replica: refused, reset, connect_timeout or no_socket; `cause` is what the system says."""

    def __init__(self, kind: Break, detail: str, cause: OSError | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.cause = cause


async def connect(pool: Pool) -> UpstreamConnection:
    """A new connection of the pool. Raises ConnectError."""
    try:
        secured = pool.secured()
        async with Patience(pool.connect_timeout_s):
            addresses = await _addresses(pool)
            if len(addresses) == 1:
                connection = await _open(pool, addresses[0], secured)
            else:
                connection = await _first(pool, addresses, secured)
    except TimeoutError:
        pool.failed()
        raise ConnectError(Break.CONNECT_TIMEOUT, "no connection within its time") from None
    except OSError as e:  # of TLS too
        pool.failed()
        raise ConnectError(_kind(e), str(e) or "the connection broke off before it was secured", e) from None
    if connection.closed:
        pool.failed()
        raise ConnectError(Break.RESET, "it was closed as soon as it was open")
    pool.opened(connection)
    sock = connection.transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


async def _addresses(pool: Pool) -> list[str]:
    """Of its host, the system's first choice first."""
    if pool.is_address:
        return [pool.host]
    found = await asyncio.get_running_loop().getaddrinfo(pool.host, pool.port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(row[4][0]) for row in found))


async def _open(pool: Pool, address: str, secured: ssl.SSLContext | None) -> UpstreamConnection:
    connection = UpstreamConnection(pool)
    protocol: Any = connection  # one in all but its base
    await asyncio.get_running_loop().create_connection(
        lambda: protocol,
        address,
        pool.port,
        ssl=secured,
        server_hostname=pool.host if secured is not None else None,
    )
    return connection


async def _first(pool: Pool, addresses: list[str], secured: ssl.SSLContext | None) -> UpstreamConnection:
    """The first to be there of connections that are begun one after the other: the next one where one failed, or has
    nothing to show for `NEXT_AFTER_S` (RFC 8305 section 5). Raises what the last one to fail says."""
    tries: list[asyncio.Task[UpstreamConnection]] = []
    open_: set[asyncio.Task[UpstreamConnection]] = set()
    left = iter(addresses)
    won: asyncio.Task[UpstreamConnection] | None = None
    error: BaseException | None = None
    try:
        while won is None:
            address = next(left, None)
            if address is not None:
                tries.append(asyncio.create_task(_open(pool, address, secured)))
                open_.add(tries[-1])
            elif not open_:
                assert error is not None
                raise error
            wait_s = None if address is None else NEXT_AFTER_S
            done, open_ = await asyncio.wait(open_, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                error = one.exception()
                if error is None and won is None:
                    won = one
        return won.result()
    finally:
        for one in tries:
            if not one.cancel() and one is not won and not one.cancelled() and one.exception() is None:
                one.result().close()


def _kind(error: OSError) -> Break:
    if sockets.ours(error):
        return Break.NO_SOCKET
    if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
        return Break.CONNECT_TIMEOUT  # no name server answers: that says nothing about the replica
    if isinstance(error, ConnectionResetError | ConnectionAbortedError):
        return Break.RESET  # in the middle of the handshake of TLS
    return Break.REFUSED
