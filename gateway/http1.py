"""One HTTP/1.1 connection to a replica: a request at a time, the response as callbacks.

llhttp parses the head; the body is delimited here, so that a chunked stream can be forwarded with its framing untouched
(one callback and one write per read). A connection that dies before the first response byte of a *reused* connection is
`stale`: the replica closed it while idle (vLLM does after 5 s) and the request was not seen. Closing is always a full
close: a half-close would leave the request running for up to half a second.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from gateway.chunks import FRAMES, FRAMES_BYTES, ChunkDecoder, ChunkError
from gateway.response_head import Head, HeadReader

if TYPE_CHECKING:
    from gateway.upstream import Pool

MAX_HEAD_BYTES = 64 * 1024
_heads = HeadReader()
__all__ = ["Break", "Head", "Receiver", "UpstreamConnection"]


class Break(StrEnum):
    """How an attempt can break below HTTP."""

    REFUSED = "refused"
    CONNECT_TIMEOUT = "connect_timeout"
    RESET = "reset"
    CLOSED = "closed"  # FIN before the end of the response
    MALFORMED = "malformed"
    NO_SOCKET = "no_socket"  # the gateway itself may open no more


class Receiver(Protocol):
    """Who gets a response. `framed` holds the chunk framing around `payload` where it can be forwarded as it is."""

    def on_head(self, head: Head) -> None: ...

    def on_whole(self, head: Head, body: bytes) -> None:
        """Head and body came in one read; nothing follows."""

    def on_data(self, payload: bytes, framed: bytes | None) -> None: ...

    def on_chunk(self, framed: bytes, start: int) -> None:
        """One whole chunk with its framing; the payload stands from `start` to two bytes before the end."""

    def on_chunks(self, framed: bytes) -> bool:
        """A read that begins with a chunk. True: it was whole chunks, and nothing of it is left to decode."""

    def on_end(self) -> None: ...

    def on_break(self, kind: Break, stale: bool) -> None: ...


class UpstreamConnection:
    """An `asyncio.Protocol` in all but name. Not thread safe; owned by its pool, lent to one receiver at a time."""

    __slots__ = (
        "_body_left", "_decoder", "_head", "_head_bytes", "_keep", "_method", "_paused", "_poll", "_receiver",
        "_saw_byte", "closed", "idle_since", "pool", "requests", "transport",
    )  # fmt: skip

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self._poll: select.poll | None = None
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
        self.requests += 1
        if self.closed or self.transport.is_closing():  # it broke since it was taken, and the loop has not said so
            self.close()
            receiver.on_break(Break.RESET, self.requests > 1)
            return
        self._reset(method)
        self._receiver = receiver
        if len(parts) == 1:
            self.transport.write(parts[0])
        else:
            self.transport.writelines(parts)

    def spoilt(self) -> bool:
        """Whether something came while it was idle that the loop has not read yet: its end, or bytes that nobody asked
        for, which would be taken for the next answer."""
        poll = self._poll
        if poll is None:
            poll = self._poll = select.poll()
            poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

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
            # the usual read is one whole chunk, one event of vLLM; several when the loop is behind
            size = len(data)
            if size < FRAMES_BYTES and data.startswith(line := FRAMES[size]) and data.endswith(b"\r\n"):
                receiver.on_chunk(data, len(line))
                return
            if receiver.on_chunks(data):
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
            interim = True
            while interim:  # a loop: a thousand of them may come in one read
                end = data.find(b"\r\n\r\n")
                if end < 0:
                    if len(data) > MAX_HEAD_BYTES:
                        self._broken(Break.MALFORMED)
                    else:
                        self._head_bytes = data
                    return
                raw, data = data[: end + 4], data[end + 4 :]
                interim = self._parse_head(raw, data)
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

    def _parse_head(self, raw: bytes, rest: bytes) -> bool:
        """True for an interim head (1xx): the next one follows. Codes beyond 599 are invalid (RFC 9110 section 15)."""
        read = _heads.read(raw)
        if read is None or not 100 <= read[0].status < 600 or read[0].status == 101:
            self._broken(Break.MALFORMED)
            return False
        head, keep = read
        status, length, chunked = head.status, head.length, head.chunked
        if status < 200:
            return True
        if self._method == b"HEAD" or status in (204, 304):
            length, chunked = 0, False
            head = Head(status, head.headers, length, chunked)
        self._keep = keep and (length is not None or chunked)
        self._head = head
        receiver = self._receiver
        assert receiver is not None
        if rest and length == len(rest) and not chunked:
            self._give_back()
            receiver.on_whole(head, rest)
            return False
        if chunked:
            self._decoder = ChunkDecoder()
        else:
            self._body_left = length or 0
        receiver.on_head(head)
        if self._receiver is not receiver:
            return False
        if length == 0 and not chunked:
            self._keep = self._keep and not rest
            self._finish()
        elif rest:
            self.data_received(rest)
        return False

    def _finish(self) -> None:
        receiver = self._receiver
        self._give_back()
        if receiver is not None:
            receiver.on_end()

    def _give_back(self) -> None:
        """The response is over: the connection is free for another, or closed."""
        self._receiver = self._decoder = None
        if self._keep:
            if self._paused:
                self.resume_reading()
            self.pool.give(self)
        else:
            self.close()

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

    def pause_writing(self) -> None:
        """A request that goes out slowly is bounded by its body, which is here already."""

    def resume_writing(self) -> None:
        pass

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
