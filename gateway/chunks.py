"""Strict decoder of chunked transfer coding (RFC 9112, section 7.1) that keeps the framing it saw.

vLLM writes each event as one chunk, so the usual read is one whole chunk and can be forwarded as it came. A chunk that
ends in a later read waits here until it is complete: bytes that were never forwarded can still be replaced by an error
event. Beyond `WHOLE_CHUNK_BYTES` a chunk is handed on in pieces, without framing, so that memory stays bounded.
"""

from __future__ import annotations

import re

WHOLE_CHUNK_BYTES = 64 * 1024
FRAMES_BYTES = 4096
MAX_LINE_BYTES = 4 * 1024  # chunk size with extensions, or one trailer line
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")


def _frame(size: int) -> bytes:
    """How a chunk of `size` bytes in all begins; no chunk has that size: something that no chunk begins with."""
    for digits in (1, 2, 3):
        payload = size - digits - 4
        if payload > 0 and len(b"%x" % payload) == digits:
            return b"%x\r\n" % payload
    return b"\r\n"


FRAMES = [_frame(size) for size in range(FRAMES_BYTES)]  # by the size of a whole chunk


class ChunkError(ValueError):
    """The bytes are not chunked coding."""


class ChunkDecoder:
    """Feed reads; get payload, the framed bytes it came in (None: not whole chunks), and whether the body ended."""

    __slots__ = ("_left", "_tail", "_trailers", "between", "rest")

    def __init__(self) -> None:
        self._tail = b""
        self._left = 0  # payload and CRLF still to come of a chunk handed on in pieces
        self._trailers = False
        self.rest = b""  # bytes after the end of the body
        self.between = True  # nothing is half read: the next byte starts a chunk

    def feed(self, data: bytes) -> tuple[bytes, bytes | None, bool]:
        """Raises ChunkError. Payload may be empty while a chunk is incomplete."""
        fed = self._feed(data)
        self.between = not (self._tail or self._left or self._trailers)
        return fed

    def _feed(self, data: bytes) -> tuple[bytes, bytes | None, bool]:
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if self._trailers:
            return b"", b"", self._end(data, 0)
        payloads: list[bytes] = []
        at = 0
        whole = not self._left
        if self._left:
            at = self._continue(data, payloads)
        size = len(data)
        start = at
        while at < size:
            match = _SIZE.match(data, at)
            if match is None:
                self._incomplete_line(data, at)
                break
            length = int(match[1], 16)
            body = match.end()
            if length == 0:
                framed = data[start:at] if whole else None
                return b"".join(payloads), framed, self._end(data, body)
            if body + length + 2 > size:
                if length <= WHOLE_CHUNK_BYTES:
                    self._tail = data[at:]
                    break
                whole = False
                self._left = length + 2
                at = self._continue(data, payloads, body)
                break
            if data[body + length : body + length + 2] != b"\r\n":
                raise ChunkError("a chunk does not end with CRLF")
            payloads.append(data[body : body + length])
            at = body + length + 2
        return b"".join(payloads), (data[start:at] if whole else None), False

    def _continue(self, data: bytes, payloads: list[bytes], at: int = 0) -> int:
        """Takes what there is of a large chunk; returns where the next one starts."""
        take = min(self._left - 2, len(data) - at)
        if take > 0:
            payloads.append(data[at : at + take])
            at += take
            self._left -= take
        if self._left > 2 or at >= len(data):
            return len(data)
        closing = data[at : at + self._left]
        if not b"\r\n".endswith(closing) if len(closing) == self._left else closing != b"\r":
            raise ChunkError("a chunk does not end with CRLF")
        self._left -= len(closing)
        return at + len(closing)

    def _incomplete_line(self, data: bytes, at: int) -> None:
        line = data[at : at + MAX_LINE_BYTES]
        if b"\n" in line or len(line) == MAX_LINE_BYTES or not re.match(rb"[0-9A-Fa-f]+", line):
            raise ChunkError(f"not a chunk size: {line[:20]!r}")
        self._tail = line

    def _end(self, data: bytes, at: int) -> bool:
        """After the last chunk: trailers are read and dropped; True once the empty line has come."""
        self._trailers = True
        while True:
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                if len(data) - at > MAX_LINE_BYTES:
                    raise ChunkError("a trailer line is too long")
                self._tail = data[at:]
                return False
            if line_end == at:
                self.rest = data[at + 2 :]
                return True
            at = line_end + 2
