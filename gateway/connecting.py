"""Opening a connection to a replica: the one thing of the pool that waits, and so a coroutine beside it."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from gateway import sockets
from gateway.http1 import Break, UpstreamConnection
from gateway.patience import Patience
from gateway.upstream import Pool

# one read of a stalled stream must stay far below the 256 KiB it may hold; uvloop reads up to 250 KiB at once
RECEIVE_BUFFER_BYTES = 64 * 1024


class ConnectError(Exception):
    """No connection to the replica: refused, reset, connect_timeout or no_socket; `cause` is what the system says."""

    def __init__(self, kind: Break, detail: str, cause: OSError | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.cause = cause


async def connect(pool: Pool) -> UpstreamConnection:
    """A new connection of the pool. Raises ConnectError."""
    connection = UpstreamConnection(pool)
    protocol: Any = connection  # one in all but its base
    try:
        secured = pool.secured()
        async with Patience(pool.connect_timeout_s):
            await asyncio.get_running_loop().create_connection(
                lambda: protocol,
                pool.host,
                pool.port,
                ssl=secured,
                server_hostname=pool.host if secured is not None else None,
            )
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


def _kind(error: OSError) -> Break:
    if sockets.ours(error):
        return Break.NO_SOCKET
    if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
        return Break.CONNECT_TIMEOUT  # no name server answers: that says nothing about the replica
    if isinstance(error, ConnectionResetError | ConnectionAbortedError):
        return Break.RESET  # in the middle of the handshake of TLS
    return Break.REFUSED
