"""One HTTP/1.1 connection to a replica: a request at a time, the response as callbacks.

llhttp parses the head; the body is delimited here, so that a chunked stream can be forwarded with its framing untouched
(one callback and one write per read). A connection that dies before the first response byte of a *reused* connection is
`stale`: the replica closed it while idle (vLLM does after 5 s) and the request was not seen. Closing is always a full
close: a half-close would leave the request running for up to half a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import httptools

from gateway.chunks import ChunkDecoder, ChunkError

if TYPE_CHECKING:
    from gateway.upstream import Pool

MAX_HEAD_BYTES = 64 * 1024
FRAMES_BYTES = 4096
Headers = list[tuple[bytes, bytes]]


def _frame(size: int) -> bytes:
    """How a chunk of `size` bytes in all begins; no chunk has that size: something that no chunk begins with."""
    for digits in (1, 2, 3):
        payload = size - digits - 4
        if payload > 0 and len(b"%x" % payload) == digits:
            return b"%x\r\n" % payload
    return b"\r\n"


_FRAMES = [_frame(size) for size in range(FRAMES_BYTES)]


class Break(StrEnum):
    """How an attempt can break below HTTP."""

    REFUSED = "refused"
    CONNECT_TIMEOUT = "connect_timeout"
    RESET = "reset"
    CLOSED = "closed"  # FIN before the end of the response
    MALFORMED = "malformed"


@dataclass(slots=True)
class Head:
    status: int
    headers: Headers  # names in lower case, as received otherwise
    length: int | None  # content-length; None: chunked or until close
    chunked: bool

    def get(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Receiver(Protocol):
    """Who gets a response. `framed` holds the chunk framing around `payload` where it can be forwarded as it is."""

    def on_head(self, head: Head) -> None: ...

    def on_data(self, payload: bytes, framed: bytes | None) -> None: ...

    def on_chunk(self, framed: bytes, start: int) -> None:
        """One whole chunk with its framing; the payload stands from `start` to two bytes before the end."""

    def on_end(self) -> None: ...

    def on_break(self, kind: Break, stale: bool) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """Not thread safe; owned by its pool, lent to one receiver at a time."""

    __slots__ = (
        "_body_left", "_decoder", "_head", "_head_bytes", "_keep", "_method", "_paused", "_receiver", "_saw_byte",
        "closed", "idle_since", "pool", "requests", "transport",
    )  # fmt: skip

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.closed = False
        self.requests = 0
        self.idle_since = 0.0
        self._receiver: Receiver | None = None
        self._paused = False
        self._reset(b"")

    def _reset(self, method: bytes) -> None:
        self._method = method
        self._head: Head | None = None
        self._head_bytes = b""
        self._decoder: ChunkDecoder | None = None
        self._body_left = 0
        self._keep = True
        self._saw_byte = False

    def send(self, method: bytes, parts: Sequence[bytes | memoryview], receiver: Receiver) -> None:
        """Writes the request (head and body as `parts`) and reports the response to `receiver`."""
        self._reset(method)
        self._receiver = receiver
        self.requests += 1
        if len(parts) == 1:
            self.transport.write(parts[0])
        else:
            self.transport.writelines(parts)

    def abort(self) -> None:
        """Gives the exchange up: no more callbacks, full close now."""
        self._receiver = None
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.pool.forget(self)
            self.transport.abort()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        decoder = self._decoder
        if decoder is None:
            self._plain(data)
            return
        receiver = self._receiver
        if receiver is None:
            return
        if decoder.between:
            # the usual read is one whole chunk: one event of vLLM
            size = len(data)
            if size < FRAMES_BYTES and data.startswith(line := _FRAMES[size]) and data.endswith(b"\r\n"):
                receiver.on_chunk(data, len(line))
                return
        try:
            payload, framed, ended = decoder.feed(data)
        except ChunkError:
            self._broken(Break.MALFORMED)
            return
        if payload:
            receiver.on_data(payload, framed)
        if ended and self._receiver is receiver:
            if decoder.rest:
                self._keep = False
            self._finish()

    def _plain(self, data: bytes) -> None:
        """A head, or a body that is delimited by its length or by the end of the connection."""
        if self._receiver is None:
            self.close()  # bytes that nobody asked for
            return
        if self._head is None:
            self._saw_byte = True
            if self._head_bytes:
                data = self._head_bytes + data
                self._head_bytes = b""
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD_BYTES:
                    self._broken(Break.MALFORMED)
                else:
                    self._head_bytes = data
                return
            self._parse_head(data[: end + 4], data[end + 4 :])
            return
        if self._head.length is None:
            self._receiver.on_data(data, None)
            return
        left = self._body_left
        if len(data) > left:
            data, self._keep = data[:left], False
        self._body_left = left - len(data)
        receiver = self._receiver
        receiver.on_data(data, None)
        if self._body_left == 0 and self._receiver is receiver:
            self._finish()

    def _parse_head(self, raw: bytes, rest: bytes) -> None:
        parsed = _HeadParser()
        try:
            parsed.parser.feed_data(raw)
        except httptools.HttpParserUpgrade:
            parsed.status = 0
        except httptools.HttpParserError:
            parsed.status = 0
        parsed.parser = None  # it holds our methods: a cycle that only the garbage collector could free
        status = parsed.status
        if status == 0 or not parsed.complete or status == 101:
            self._broken(Break.MALFORMED)
            return
        if status < 200:
            if rest:
                self._plain(rest)
            return
        length, chunked = parsed.length, parsed.chunked
        if self._method == b"HEAD" or status in (204, 304):
            length, chunked = 0, False
        self._keep = parsed.keep and (length is not None or chunked)
        head = self._head = Head(status, parsed.headers, length, chunked)
        receiver = self._receiver
        assert receiver is not None
        if chunked:
            self._decoder = ChunkDecoder()
        else:
            self._body_left = length or 0
        receiver.on_head(head)
        if self._receiver is not receiver:
            return
        if length == 0 and not chunked:
            self._keep = self._keep and not rest
            self._finish()
        elif rest:
            self.data_received(rest)

    def _finish(self) -> None:
        receiver, self._receiver = self._receiver, None
        self._decoder = None
        if self._keep:
            self._reset(b"")
            self.idle_since = time.monotonic()
            if self._paused:
                self.resume_reading()
            self.pool.give(self)
        else:
            self.close()
        if receiver is not None:
            receiver.on_end()

    def _broken(self, kind: Break) -> None:
        receiver, self._receiver = self._receiver, None
        stale = self.requests > 1 and not self._saw_byte and kind is not Break.MALFORMED
        self.close()
        if receiver is not None:
            receiver.on_break(kind, stale)

    def eof_received(self) -> bool:
        head = self._head
        if self._receiver is not None and head is not None and head.length is None and not head.chunked:
            self._keep = False
            self._finish()
        else:
            self._broken(Break.CLOSED)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._broken(Break.CLOSED if exc is None else Break.RESET)

    def pause_reading(self) -> None:
        if not self.closed and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.closed and self._paused:
            self._paused = False
            self.transport.resume_reading()


class _HeadParser:
    """What llhttp makes of one response head."""

    __slots__ = ("chunked", "complete", "headers", "keep", "length", "parser", "status")

    def __init__(self) -> None:
        self.headers: Headers = []
        self.status = 0
        self.length: int | None = None
        self.chunked = False
        self.keep = True
        self.complete = False
        self.parser: Any = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.headers.append((name, value))
        if name == b"content-length":
            self.length = int(value)
        elif name == b"transfer-encoding":
            self.chunked = value.rstrip().lower().endswith(b"chunked")

    def on_headers_complete(self) -> None:
        self.complete = True
        self.status = self.parser.get_status_code()
        self.keep = self.parser.should_keep_alive()
