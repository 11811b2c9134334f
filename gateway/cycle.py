"""One request on a uvicorn connection and its answer, written straight to the transport.

Both a uvicorn cycle (`receive`, `send`, for the control plane's FastAPI) and a `client.Client` (for the proxy): heads
are joined and written with the first body bytes, streamed reads go out as they came. An answer given before the whole
body was read is followed by a short linger, since closing with unread bytes resets the connection and with it the
answer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from gateway import arriving, endpoints, errors
from gateway.client import BODYLESS, SPLICE, ClientGoneError, Listener, too_large
from gateway.door import Door, Receipt
from gateway.errors import Api, GatewayError
from gateway.headers import Headers

if TYPE_CHECKING:
    from gateway.wire import WireProtocol

LINGER_S = 2.0  # time a refused sender has to read our answer before the connection goes
_rng = random.SystemRandom()  # it has no state that forked processes could share


class SplicedCycle(RequestResponseCycle):
    # what a new cycle starts with; set on the instance where it changes
    disconnected = False
    more_body = True
    response_started = False
    response_complete = False
    chunked_encoding: bool | None = None
    expected_content_length = 0
    size = 0
    limit_bytes: int | None = None  # set once somebody reads the body
    listener: Listener | None = None
    waiter: asyncio.Future[None] | None = None
    receipt: Receipt | None = None
    _event: asyncio.Event | None = None
    _head = b""  # not yet written
    _length_given = False
    _asgi = False
    was_read = False  # an application has had the whole body

    def __init__(
        self,
        protocol: WireProtocol,
        scope: Any,
        transport: asyncio.Transport,
        flow: FlowControl,
        expect_100_continue: bool,
        keep_alive: bool,
    ) -> None:
        # not super().__init__: it makes an event and an access log's fields for every request
        self.protocol = protocol
        self.scope = scope
        self.transport = transport
        self.flow = flow
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expect_100_continue
        self.parts: list[bytes] = []
        self.framed = scope["http_version"] == "1.1"
        self.raw = transport.write

    def for_asgi(self) -> None:
        """What only an ASGI application needs; it may write to its scope, so that is its own."""
        protocol = self.protocol
        self._asgi = True
        self.logger = protocol.logger
        self.access_logger = protocol.access_logger
        self.access_log = protocol.access_log
        self.default_headers = protocol.server_state.default_headers
        self.scope = {**self.scope, "state": self.scope["state"].copy(), "extensions": {SPLICE: self}}  # type: ignore[dict-item]

    def on_response(self) -> None:
        self.protocol.on_response_complete()

    @property
    def message_event(self) -> asyncio.Event:  # type: ignore[override]
        """Only ASGI applications wait on it."""
        if self._event is None:
            self._event = asyncio.Event()
        return self._event

    @property
    def paused(self) -> bool:
        return bool(self.flow.write_paused)

    @property
    def unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    # -- the request ---------------------------------------------------------------------------------------------

    def take_body(self, limit_bytes: int) -> bytes | None:
        if self.more_body or self.disconnected or self.size > limit_bytes:
            return None
        self.limit_bytes = limit_bytes
        self.flow.resume_reading()  # a large body may have come whole and paused it: the client's end would go unseen
        parts, self.parts = self.parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_body(self, limit_bytes: int, timeout_s: float, door: Door) -> Coroutine[Any, Any, bytes]:
        return arriving.read_body(self, limit_bytes, timeout_s, door)

    def go_on(self) -> None:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False

    def arrived(self) -> None:
        """More of the body is here, or the client left."""
        if self._event is not None:
            self._event.set()
        waiter, receipt = self.waiter, self.receipt
        if waiter is None or receipt is None or waiter.done():
            return
        full = receipt.grown(self.size)
        if self.disconnected:
            waiter.set_exception(ClientGoneError())
        elif self.limit_bytes is not None and self.size > self.limit_bytes:
            waiter.set_exception(too_large(self.limit_bytes))
        elif full is not None:
            waiter.set_exception(full)
        elif not self.more_body:
            waiter.set_result(None)

    def lost(self) -> None:
        """The connection is gone."""
        self.disconnected = True
        self.arrived()
        if self.listener is not None:
            self.listener.on_gone()

    def receive(self) -> Coroutine[Any, Any, Any]:
        return arriving.receive(self)

    # -- the answer ----------------------------------------------------------------------------------------------

    def _nobody(self) -> bool:
        """Whether there is nobody to answer: the connection broke, be it that the loop has not said so yet, or the rest
        of the request turned out to be none, and `refuse` has had the last word."""
        if self.transport.is_closing():
            self.disconnected = True
        return self.disconnected

    def respond(self, status: int, headers: Headers, body: bytes, length: int | None = None) -> None:
        if self._nobody() or self.response_started:
            return
        self.start(status, headers, len(body) if length is None else length)
        if self.scope["method"] == "HEAD" or status in BODYLESS:
            self.transport.write(self._head)
        else:
            self.transport.write(self._head + body)
        self._head = b""
        self._complete()

    def respond_joined(self, status: int, lines: bytes, body: bytes) -> None:
        if self._nobody() or self.response_started:
            return
        self.response_started = True
        self.waiting_for_100_continue = False
        if self.more_body:
            self.keep_alive = False
        if status in BODYLESS:  # RFC 9110 section 8.6: no length
            end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
            self.transport.write(b"%b%b%b" % (STATUS_LINE[status], lines, end))
            self._complete()
            return
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        self.transport.write(b"%b%bcontent-length: %d\r\n%b%b" % (STATUS_LINE[status], lines, len(body), end, body))
        self._complete()

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        self.response_started = True
        self.waiting_for_100_continue = False
        lines = [STATUS_LINE[status]]
        for name, value in headers:
            lines += [name, b": ", value, b"\r\n"]
        if length is not None:
            self._length_given = True
            if status not in BODYLESS:
                lines.append(b"content-length: %d\r\n" % length)
        elif self.framed and status not in BODYLESS:
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            self.keep_alive = False
        if self.more_body:
            self.keep_alive = False
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    def write(self, payload: bytes) -> None:
        if self.chunked_encoding:
            payload = b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""
        self.write_framed(payload)

    def write_framed(self, framed: bytes) -> None:
        if self._head:
            framed, self._head = self._head + framed, b""
        if not self._nobody():
            self.transport.write(framed)

    def end(self) -> None:
        closing = b"0\r\n\r\n" if self.chunked_encoding else b""
        if self._head or closing:
            self.write_framed(closing)
        self._complete()

    def break_off(self) -> None:
        self.response_complete = True
        self.listener = None
        if self.chunked_encoding is None and not self._length_given:
            self.transport.abort()  # where the end of the connection is the end of the body, only a reset tells
        else:
            self.protocol.close()
        self.on_response()

    def abandon(self) -> None:
        self.transport.abort()

    def _complete(self) -> None:
        self.response_complete = True
        self.listener = None
        if self._asgi:
            self.scope.pop("extensions", None)  # it knows us
        if self._event is not None:
            self._event.set()
        if not self.keep_alive:
            if self.more_body:
                linger(self.protocol)
            else:
                self.protocol.close()
        self.on_response()


def refuse(protocol: WireProtocol, error: GatewayError, path: str) -> None:
    """Answers a connection whose request cannot be read, then closes it."""
    endpoint = endpoints.find(path)
    body = errors.body(error, Api.OTHER if endpoint is None else endpoint.api)
    lines = [STATUS_LINE[error.status]]
    for name, value in errors.headers(error, _rng):
        if name != b"connection":
            lines += [name, b": ", value, b"\r\n"]
    lines.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
    if protocol.parser.get_method() != b"HEAD":
        lines.append(body)
    protocol.transport.write(b"".join(lines))
    linger(protocol)


def linger(protocol: WireProtocol) -> None:
    """Ends our side now and the connection soon: closing with unread bytes would reset it and lose the answer."""
    if protocol.transport.can_write_eof():
        protocol.transport.write_eof()
    protocol.loop.call_later(LINGER_S, protocol.close)
