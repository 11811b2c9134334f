"""The head of a replica's response: parsed by llhttp, and remembered, since a replica's heads hardly differ.

Two heads of one second differ in content-length only. So a parsed head is kept under its bytes without that number,
with the lines a client gets of it joined once; the next one costs a search and a look-up instead of a parse. What is
new, or has no plain content-length, goes through the parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import httptools

from gateway.headers import Headers, downstream

MOST_KNOWN = 512
_LENGTH = re.compile(rb"\r\ncontent-length: ([0-9]{1,15})\r\n", re.IGNORECASE)


@dataclass(slots=True, init=False)
class Head:
    status: int
    headers: Headers  # names in lower case, as received otherwise
    length: int | None  # content-length; None: chunked or until close
    chunked: bool
    lines: bytes | None  # those that a client gets, as they are written; None: not joined yet

    def __init__(
        self,
        status: int,
        headers: Headers,
        length: int | None,
        chunked: bool,
        lines: bytes | None = None,
    ) -> None:
        self.status = status
        self.headers = headers
        self.length = length
        self.chunked = chunked
        self.lines = lines

    def get(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None


class HeadReader:
    """Reads heads. One for the process: what one replica says, others say too."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Head, bool]] = {}
        # the last one with a plain length: what stands before and behind that number; heads of one second begin alike
        self._before = self._after = b""
        self._last: tuple[Head, bool] | None = None

    def read(self, raw: bytes) -> tuple[Head, bool] | None:
        """The head and whether the connection stays open after it; None where it is no valid head."""
        last = self._last
        if last is not None and raw.startswith(self._before) and raw.endswith(self._after):
            digits = raw[len(self._before) : -len(self._after)]
            if digits.isdigit() and len(digits) < 16:
                head, keep = last
                return Head(head.status, head.headers, int(digits), False, head.lines), keep
        length = _LENGTH.search(raw)
        key = raw if length is None else raw[: length.start(1)] + raw[length.end(1) :]
        known = self._known.get(key)
        if known is not None:
            if length is None:
                return known
            self._before, self._after, self._last = raw[: length.start(1)], raw[length.end(1) :], known
            head, keep = known
            return Head(head.status, head.headers, int(length[1]), False, head.lines), keep
        parsed = _parse(raw)
        if parsed is not None and parsed[0].status >= 200:
            head, keep = parsed
            head.lines = b"".join([b"%b: %b\r\n" % pair for pair in downstream(head.headers)])
            once = raw.lower().count(b"content-length") == (length is not None)
            if once and head.length == (None if length is None else int(length[1])) and not (length and head.chunked):
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                self._known[key] = parsed
        return parsed


def _parse(raw: bytes) -> tuple[Head, bool] | None:
    read = _Parser()
    try:
        read.parser.feed_data(raw)
    except (httptools.HttpParserUpgrade, httptools.HttpParserError):
        return None
    finally:
        read.parser = None  # it holds our methods: a cycle that only the garbage collector could free
    if not read.complete or read.codings not in ([], [b"chunked"]):
        return None  # nobody asked for another coding, and without its header the client could not undo it
    return Head(read.status, read.headers, read.length, bool(read.codings)), read.keep


class _Parser:
    """What llhttp makes of one response head."""

    __slots__ = ("codings", "complete", "headers", "keep", "length", "parser", "status")

    def __init__(self) -> None:
        self.headers: Headers = []
        self.status = 0
        self.length: int | None = None
        self.codings: list[bytes] = []
        self.keep = True
        self.complete = False
        self.parser: Any = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.headers.append((name, value))
        if name == b"content-length":
            self.length = int(value)
        elif name == b"transfer-encoding":
            self.codings += [coding.strip().lower() for coding in value.split(b",")]

    def on_headers_complete(self) -> None:
        self.complete = True
        self.status = self.parser.get_status_code()
        self.keep = self.parser.should_keep_alive()
