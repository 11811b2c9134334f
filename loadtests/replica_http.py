"""HTTP of the simulated replicas: one asyncio.Protocol over httptools, as bare as a fleet on a laptop needs.

As vLLM's server: headers of a stream leave at once, one chunk per event, keep-alive connections close after 5 s
idle, a client that closes (or half-closes) aborts its request, no limit on bodies. One request at a time per
connection; a pipelined one waits. Beyond vLLM: `/forebay/fault` and `/forebay/sim` steer and read the simulation;
with several replicas in one process `?replica=I` reaches one whose own port refuses.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs

import httptools
import orjson

from loadtests.live_replica import Answer, new_id

if TYPE_CHECKING:
    from loadtests.replica_routes import Routes

KEEP_ALIVE_S = 5.0
_REASONS = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found",
    405: b"Method Not Allowed", 422: b"Unprocessable Entity", 500: b"Internal Server Error",
    501: b"Not Implemented", 503: b"Service Unavailable",
}  # fmt: skip
_date = (0, b"")


def date_line() -> bytes:
    global _date
    now = int(time.time())
    if _date[0] != now:
        _date = (now, b"date: " + formatdate(now, usegmt=True).encode() + b"\r\nserver: uvicorn\r\n")
    return _date[1]


class Exchange:
    """One request and where its answer goes (a `Sink`)."""

    __slots__ = ("answer", "body", "closing", "headers", "id", "method", "open", "path", "protocol", "query")

    def __init__(self, protocol: ReplicaProtocol) -> None:
        self.protocol = protocol
        self.method = ""
        self.path = ""
        self.query: dict[str, list[str]] = {}
        self.headers: dict[bytes, bytes] = {}
        self.body: bytes | bytearray = b""
        self.id = ""
        self.open = True
        self.closing = False
        self.answer: Answer | None = None

    def json(self) -> Any:
        return orjson.loads(self.body) if self.body else {}

    def _tail(self) -> bytes:
        tail = b"vary: Origin\r\n" + (b"x-request-id: " + self.id.encode() + b"\r\n" if self.id else b"")
        return tail + (b"connection: close\r\n" if self.closing else b"")

    def head(self) -> None:
        self.write(
            b"HTTP/1.1 200 OK\r\n"
            + date_line()
            + b"content-type: text/event-stream; charset=utf-8\r\n"
            + self._tail()
            + b"transfer-encoding: chunked\r\n\r\n"
        )

    def write(self, data: bytes) -> None:
        # a client may be gone before its connection_lost is called; uvloop raises then, and a step must go on
        if not self.protocol.transport.is_closing():
            self.protocol.transport.write(data)

    def close(self) -> None:
        """The response is complete."""
        if self.open:
            self.open = False
            self.protocol.finished(self)

    def respond(
        self, status: int, body: object, kind: bytes = b"application/json", extra: bytes = b"", empty: bool = False
    ) -> None:
        if not self.open:
            return
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        head = b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"")) + date_line() + extra
        head += b"content-length: %d\r\n" % len(data)
        if not empty:
            head += b"content-type: " + kind + b"\r\n"
        self.write(head + self._tail() + b"\r\n" + (b"" if self.method == "HEAD" else data))
        self.close()

    def cut(self) -> None:
        """A plain FIN in the middle, as when the process dies."""
        self.open = False
        self.protocol.transport.close()


class ReplicaProtocol(asyncio.Protocol):
    """One connection."""

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self.transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._current: Exchange | None = None  # answered now
        self._reading: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        self._url = b""
        self._parts: list[bytes] = []
        self._idle: asyncio.TimerHandle | None = None

    # -- asyncio ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.routes.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 30\r\n"
                b"connection: close\r\n\r\nInvalid HTTP request received."
            )
            self.transport.close()

    def eof_received(self) -> bool:
        return False  # a half-close aborts too

    def connection_lost(self, exc: Exception | None) -> None:
        self.routes.connections.discard(self)
        if self._idle is not None:
            self._idle.cancel()
        current, self._current = self._current, None
        self._queue.clear()
        if current is not None and current.open:
            current.open = False
            if current.answer is not None:
                self.routes.replica.leave(current.answer)

    # -- httptools -------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._reading = Exchange(self)
        self._url = b""
        self._parts = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._reading is not None
        self._reading.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        assert self._reading is not None
        if self._reading.headers.get(b"expect", b"").lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        exchange, self._reading = self._reading, None
        assert exchange is not None
        exchange.method = self._parser.get_method().decode()
        parsed = httptools.parse_url(self._url)
        exchange.path = parsed.path.decode() if parsed.path else "/"
        if parsed.query:
            exchange.query = parse_qs(parsed.query.decode())
        exchange.body = b"".join(self._parts) if len(self._parts) != 1 else self._parts[0]
        self._parts = []
        exchange.closing = not self._parser.should_keep_alive()
        given = exchange.headers.get(b"x-request-id")
        exchange.id = given.decode("latin-1") if given else new_id()
        if self._current is None:
            self._start(exchange)
        else:
            self._queue.append(exchange)

    def _start(self, exchange: Exchange) -> None:
        self._current = exchange
        self.routes.handle(exchange)

    def finished(self, exchange: Exchange) -> None:
        if self._current is exchange:
            self._current = None
        if exchange.closing:
            self.transport.close()
        elif self._queue:
            self._start(self._queue.popleft())
        elif not self.transport.is_closing():
            self._idle = self._loop.call_later(KEEP_ALIVE_S, self.transport.close)
