"""A lean HTTP/1.1 client for load: one asyncio.Protocol per connection, httptools as the parser, no hidden cap.

General clients limit connections a host, queue behind that limit silently, and spend more time per event than a
gateway does; each of these turns an open loop into a closed one (aiohttp's default is 100 a session). Here a
request takes an idle connection or opens one, always. Idle connections are dropped before the server's keep-alive
(vLLM: 5 s) ends; one that dies before its first response byte on reuse is replaced once, uncounted as an attempt.
Abandoning closes the connection fully: a half-close is seen late by vLLM. The trade-off: no HTTP/2, no proxies.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

from loadtests.answer import Answer

IDLE_S = 3.5  # below the 5 s after which uvicorn closes an idle connection


class BadUrlError(ValueError):
    """A target that is no http(s) URL."""


class StaleConnectionError(ConnectionError):
    """A reused connection died before any byte of the response."""


@dataclass(slots=True, frozen=True)
class Target:
    """Where to send: `http://host:port/prefix`, `/v1` added by whoever names the path."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Target:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadUrlError(f"--url {url!r}: expected http://host:port or https://host:port")
        try:
            port = parts.port
        except ValueError:
            raise BadUrlError(f"--url {url!r}: the port must be a number from 1 to 65535") from None
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix.removesuffix("/v1"))

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time. Owns transport, parser and the answer being read."""

    __slots__ = (
        "_finished", "_headers_wanted", "_parser", "answer", "clock", "closed", "headers", "idle_since", "transport",
    )  # fmt: skip

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.transport: asyncio.Transport | None = None
        self.answer: Answer | None = None
        self.headers: dict[str, str] = {}
        self.closed = False
        self.idle_since = 0.0
        self._parser: httptools.HttpResponseParser | None = None
        self._finished: asyncio.Future[bool] | None = None
        self._headers_wanted = True

    def exchange(self, head: bytes, body: bytes, answer: Answer) -> asyncio.Future[bool]:
        """Sends one request; the future gives whether the connection may be reused, or raises ConnectionError."""
        assert self.transport is not None
        self.answer, self.headers = answer, {}
        self._parser = httptools.HttpResponseParser(self)
        self._finished = asyncio.get_running_loop().create_future()
        # two writes: no copy of a long prompt
        self.transport.write(head)
        if body:
            self.transport.write(body)
        return self._finished

    def abort(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self.abort()  # bytes nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"not HTTP: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._finished is not None and not self._finished.done():
            answer = self.answer
            assert answer is not None
            if answer.status is not None and self._ends_with_connection():
                answer.end(self.clock())
                self._end(None)
            elif answer.status is None and self.idle_since > 0.0:
                self._end(StaleConnectionError("closed by the server before it answered"))
            else:
                self._end(ConnectionError(str(exc) if exc else "closed by the server"))
        self._parser = None
        self.transport = None

    def _ends_with_connection(self) -> bool:
        return "content-length" not in self.headers and "transfer-encoding" not in self.headers

    # httptools
    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self.answer is not None
        status = self._parser.get_status_code()
        if status >= 200:
            self.answer.status = status
            if self.answer.streamed and "event-stream" not in self.headers.get("content-type", ""):
                self.answer.streamed = False

    def on_body(self, data: bytes) -> None:
        assert self.answer is not None
        self.answer.feed(data, self.clock())

    def on_message_complete(self) -> None:
        assert self._parser is not None
        assert self.answer is not None
        if self.answer.status is None:  # 1xx
            return
        self.answer.end(self.clock())
        reusable = self._parser.should_keep_alive() and not self.closed
        self._parser = None  # parser and connection refer to each other: GC is off during a run
        self._end(None, reusable)

    def _end(self, error: Exception | None, reusable: bool = False) -> None:
        if self._finished is not None and not self._finished.done():
            if error is None:
                self._finished.set_result(reusable)
            else:
                self._finished.set_exception(error)


@dataclass(slots=True)
class Client:
    """Connections to one target. `opened` counts set-ups, `reused` the requests that needed none."""

    target: Target
    clock: Callable[[], float]
    api_key: str | None = None
    tls: ssl.SSLContext | None = None
    connect_timeout_s: float = 10.0
    opened: int = 0
    reused: int = 0
    _idle: list[Connection] = field(default_factory=list)
    _busy: set[Connection] = field(default_factory=set)

    async def warm(self, connections: int) -> None:
        """Opens connections ahead, so that set-up time is in no arm's first latencies."""
        made = await asyncio.gather(*(self._connect() for _ in range(connections)), return_exceptions=True)
        for one in made:
            if isinstance(one, Connection):
                self._keep(one)

    async def send(
        self, path: str, body: bytes, answer: Answer, *, headers: dict[str, str] | None = None, method: str = "POST"
    ) -> dict[str, str]:
        """One attempt, read into `answer` to its end; gives the response headers.

        Raises ConnectionError or OSError when there is no connection or it broke; what came before is in `answer`.
        Cancelling the call closes the connection at once.
        """
        head = self._head(method, path, body, headers)
        connection, fresh = await self._take()
        try:
            return await self._exchange(connection, head, body, answer)
        except StaleConnectionError:
            if fresh:
                raise
            return await self._exchange(await self._connect(), head, body, answer)

    async def _exchange(self, connection: Connection, head: bytes, body: bytes, answer: Answer) -> dict[str, str]:
        self._busy.add(connection)
        reusable = False
        try:
            reusable = await connection.exchange(head, body, answer)
            return connection.headers
        finally:
            self._busy.discard(connection)
            connection.answer = None
            if reusable:
                self._keep(connection)
            else:
                connection.abort()

    async def _take(self) -> tuple[Connection, bool]:
        oldest = self.clock() - IDLE_S
        while self._idle:
            connection = self._idle.pop()  # the most recently used
            if not connection.closed and connection.idle_since >= oldest:
                self.reused += 1
                return connection, False
            connection.abort()
        return await self._connect(), True

    async def _connect(self) -> Connection:
        self.opened += 1
        tls = (self.tls or ssl.create_default_context()) if self.target.tls else None
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.connect_timeout_s):
            _, connection = await loop.create_connection(
                lambda: Connection(self.clock), self.target.host, self.target.port, ssl=tls
            )
        return connection

    def _keep(self, connection: Connection) -> None:
        connection.idle_since = self.clock()
        self._idle.append(connection)

    def _head(self, method: str, path: str, body: bytes, headers: dict[str, str] | None) -> bytes:
        lines = [f"{method} {self.target.prefix}{path} HTTP/1.1", f"Host: {self.target.authority}"]
        if method != "GET":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def close(self) -> None:
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()
        self._busy.clear()
