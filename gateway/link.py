"""The wire between a hand and the core: frames of small messages over a Unix socket, one write per turn of the loop.

A message is a JSON array that begins with a number of `messages.py`; a frame is a length of four bytes and an array of
messages. Everything told during one turn of the event loop leaves in one write, and everything read in one turn is
handed over before answers leave, so under load the cost of a system call is shared by many requests.
Trade-off: JSON is not the smallest form, but orjson writes and reads it in C faster than Python can pack structs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import orjson

from gateway.dumped import dumps
from gateway.messages import Message

MOST_FRAME_BYTES = 256 * 1024 * 1024  # beyond it the other side is not ours
MENTION_S = 0.002
log = logging.getLogger("forebay.link")


def _ignore(message: Message) -> None:
    """Of a link that was left."""


def _ignore_end() -> None:
    """The same."""


class Link:
    """One end; an `asyncio.Protocol` by its methods. `heard` gets each message, `lost` the end of it, once."""

    def __init__(self, heard: Callable[[Message], None], lost: Callable[[], None]) -> None:
        self._heard = heard
        self._lost = lost
        self._out: list[bytes] = []
        self._due = False  # a flush follows in this turn
        self._timer: asyncio.TimerHandle | None = None  # of what was mentioned; it outlives a flush before it
        self._in = bytearray()  # the beginning of a frame
        self._wants = 4  # bytes of it, at least
        self._transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def alive(self) -> bool:
        return self._transport is not None

    def tell(self, message: Message) -> None:
        """Sent with everything else of this turn. Raises TypeError for what is no JSON, telling nothing."""
        encoded = dumps(message)
        if self._transport is None or self._loop is None:
            return  # nobody is there any more; whoever waits is told by `lost`
        if not self._due:
            self._due = True
            self._loop.call_soon(self.flush)
        self._out.append(encoded)

    def mention(self, message: Message) -> None:
        """Sent with what is told next, in the order of telling, or within `MENTION_S` where nothing is: for news that
        nobody waits for, since waking the other side costs more than the message. Raises as `tell` does."""
        encoded = dumps(message)
        if self._transport is None or self._loop is None:
            return
        if not self._due and self._timer is None:
            self._timer = self._loop.call_later(MENTION_S, self._mentioned)
        self._out.append(encoded)

    def _mentioned(self) -> None:
        self._timer = None
        self.flush()

    def flush(self) -> None:
        self._due = False
        out = self._out
        if out and self._transport is not None:
            payload = b"[%b]" % b",".join(out)
            self._transport.write(len(payload).to_bytes(4, "little") + payload)
        self._out = []

    def close(self) -> None:
        """What was told so far still leaves."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def leave(self) -> None:
        """What was told so far still arrives, and nothing is heard any more, nor `lost` called. Only our end closes:
        a socket that is gone makes the other side's next write fail, and with that goes what it has not read yet."""
        self.flush()
        self._heard, self._lost, self._loop = _ignore, _ignore_end, None
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def drop(self) -> None:
        """Ends it at once; `lost` is not called any more."""
        transport, self._transport = self._transport, None
        self._out = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if transport is not None:
            transport.abort()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so
        self._transport.set_write_buffer_limits(high=MOST_FRAME_BYTES)
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        rest = self._in
        if rest:  # a frame that came in parts is copied twice, however many they are
            rest += data
            if len(rest) < self._wants:
                return
            data = bytes(rest)
            rest.clear()
        at, end, wants = 0, len(data), 4
        while end - at >= 4:
            size = int.from_bytes(data[at : at + 4], "little")
            if size > MOST_FRAME_BYTES:
                log.error("a frame of %d bytes: the other side of the link is not ours", size)
                self._end()
                return
            if end - at - 4 < size:
                wants = 4 + size
                break
            messages: list[Message] = orjson.loads(data[at + 4 : at + 4 + size])
            at += 4 + size
            for message in messages:
                try:
                    self._heard(message)
                except Exception:
                    log.exception("a message of the link failed, of kind %s", message[0])
        if at < end:
            rest += data[at:]
            self._wants = wants

    def pause_writing(self) -> None:
        """Never before `MOST_FRAME_BYTES` wait."""

    def resume_writing(self) -> None:
        """What waited has left."""

    def eof_received(self) -> None:
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if self._transport is not None:
            self.drop()
            self._lost()
