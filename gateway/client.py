"""The client's end of one exchange, as the proxy uses it, and its form on any ASGI server.

`Client` is what the proxy writes to: plain calls without awaiting, plus callbacks for "left", "stop" and "go on".
`wire.py` implements it on uvicorn's transport, without tasks or queues between. `SendClient` implements it over
`receive` and `send` of any other server: one task sends what was queued, and asks for a pause beyond 64 KiB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from gateway.door import Door
from gateway.errors import Code, GatewayError
from gateway.headers import Headers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HIGH_WATER_BYTES = 64 * 1024
SPLICE = "forebay.splice"
BODYLESS = frozenset({204, 304})  # no body, and no length of one (RFC 9110 section 8.6)


class ClientGoneError(Exception):
    """The client closed its connection."""


class Listener(Protocol):
    def on_gone(self) -> None: ...

    def on_pause(self) -> None: ...

    def on_resume(self) -> None: ...


class Client(Protocol):
    framed: bool  # chunk framing may be written as received
    listener: Listener | None

    @property
    def paused(self) -> bool:
        """It does not read."""

    @property
    def raw(self) -> Callable[[bytes], None]:
        """`write_framed` for all but the first write."""

    @property
    def unsent(self) -> int:
        """Bytes written to it and not yet taken, as far as this process knows."""

    def take_body(self, limit_bytes: int) -> bytes | None:
        """The body if all of it is here; None: `read_body` waits for it, or says what is wrong with it."""

    async def read_body(self, limit_bytes: int, timeout_s: float, door: Door) -> bytes:
        """The whole body. Raises GatewayError (too_large, body_too_slow, queue_full) or ClientGoneError."""

    def respond(self, status: int, headers: Headers, body: bytes, length: int | None = None) -> None:
        """A whole answer at once; `length` is what content-length says where that is not the body's (HEAD)."""

    def respond_joined(self, status: int, lines: bytes, body: bytes) -> None:
        """The same with header lines as they are written; only where `framed` is true, and not to HEAD."""

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        """The head of an answer whose body follows; `length` None: chunked, or until close for HTTP/1.0."""

    def write(self, payload: bytes) -> None:
        """Body bytes; framed here."""

    def write_framed(self, framed: bytes) -> None:
        """Whole chunks with their framing; only where `framed` is true and no length was given."""

    def end(self) -> None: ...

    def break_off(self) -> None:
        """Ends the answer so that the client sees it is not whole."""

    def abandon(self) -> None:
        """It takes nothing any more: drops what waits for it and the connection; `on_gone` follows."""


def too_large(limit_bytes: int) -> GatewayError:
    return GatewayError(Code.TOO_LARGE, f"the request body is larger than the limit of {limit_bytes} bytes")


def too_slow(timeout_s: float) -> GatewayError:
    return GatewayError(Code.BODY_TOO_SLOW, f"the request body did not arrive within {timeout_s:g} s")


class SendClient:
    """Over plain ASGI. `run` must be awaited at the end: it waits until everything queued is sent."""

    framed = False

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paused = False
        self.listener: Listener | None = None
        self._head_only = scope["method"] == "HEAD"
        self._receive = receive
        self._send = send
        self._queue: list[MutableMapping[str, Any]] = []
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._ended = False
        self._broken = False
        self.gone = False
        self._sender = asyncio.create_task(self._pump())
        self._watcher: asyncio.Task[None] | None = None

    @property
    def raw(self) -> Callable[[bytes], None]:
        return self.write_framed

    @property
    def unsent(self) -> int:
        return self._queued_bytes

    def take_body(self, limit_bytes: int) -> bytes | None:
        return None

    async def read_body(self, limit_bytes: int, timeout_s: float, door: Door) -> bytes:
        parts: list[bytes] = []
        size = 0
        receipt = door.receipt()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        self.gone = True
                        raise ClientGoneError
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit_bytes:
                        raise too_large(limit_bytes)
                    if (full := receipt.grown(size)) is not None:
                        raise full
                    parts.append(part)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise too_slow(timeout_s) from None
        finally:
            receipt.close()
        self._watcher = asyncio.create_task(self._watch())
        return b"".join(parts)

    def respond(self, status: int, headers: Headers, body: bytes, length: int | None = None) -> None:
        self.start(status, headers, len(body) if length is None else length)
        if not self._head_only and status not in BODYLESS:
            self.write(body)
        self.end()

    def respond_joined(self, status: int, lines: bytes, body: bytes) -> None:
        raise AssertionError("framing belongs to the server here")

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        if length is not None and status not in BODYLESS:
            headers = [*headers, (b"content-length", b"%d" % length)]
        self._put({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, payload: bytes) -> None:
        self._queued_bytes += len(payload)
        self._put({"type": "http.response.body", "body": payload, "more_body": True})
        if self._queued_bytes > HIGH_WATER_BYTES and not self.paused:
            self.paused = True
            if self.listener is not None:
                self.listener.on_pause()

    def write_framed(self, framed: bytes) -> None:
        raise AssertionError("framing belongs to the server here")

    def end(self) -> None:
        self._put({"type": "http.response.body", "body": b"", "more_body": False})
        self._ended = True
        self._wake.set()

    def break_off(self) -> None:
        self._broken = self._ended = True
        self._wake.set()

    def abandon(self) -> None:
        self.gone = True
        if self.listener is not None:
            self.listener.on_gone()

    async def run(self) -> None:
        """Until all is sent. Raises RuntimeError after `break_off`, so that the server cuts the connection."""
        await self._sender
        if self._watcher is not None:
            self._watcher.cancel()
        if self._broken:
            raise RuntimeError("the answer was broken off after its head was sent")

    def close(self) -> None:
        """Stops the tasks; the client is gone."""
        for task in (self._sender, self._watcher):
            if task is not None:
                task.cancel()

    def _put(self, message: MutableMapping[str, Any]) -> None:
        self._queue.append(message)
        self._wake.set()

    async def _pump(self) -> None:
        while True:
            while self._queue:
                message = self._queue.pop(0)
                await self._send(message)
                self._queued_bytes -= len(message.get("body", b""))
                if self.paused and self._queued_bytes < HIGH_WATER_BYTES // 4:
                    self.paused = False
                    if self.listener is not None:
                        self.listener.on_resume()
            if self._ended:
                return
            self._wake.clear()
            await self._wake.wait()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self.listener is not None and not self._ended:
            self.listener.on_gone()
