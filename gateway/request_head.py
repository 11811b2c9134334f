"""The head of a client's request, read once for all requests of its connection that begin alike.

Clients reuse connections, and the heads they send on one differ in content-length only. After llhttp has accepted a
head, the bytes before and after that number are the template for the next: what begins with the same bytes and a plain
number, and has exactly so many bytes of body, is the same request with another body. So nothing of it is parsed again,
and its forwarded form is ready. Whatever differs in one byte goes through the parser as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httptools

from gateway.client import Scope
from gateway.headers import Headers
from gateway.upstream import Pool

_LENGTH = b"\r\ncontent-length:"
_UNSAFE = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"connection"})
_MOST_POOLS = 1024
_OF_AN_UPGRADE = frozenset({b"upgrade", b"connection", b"http2-settings"})


class RequestHead:
    """`scope` is shared by every request of this head: nobody writes to it."""

    __slots__ = ("_after", "_before", "_forwarded", "first", "scope")

    def __init__(self, scope: Scope, before: bytes, after: bytes) -> None:
        self.scope = scope
        self.first: Mapping[bytes, bytes] = dict(reversed(scope["headers"]))  # first value of each name
        self._before, self._after = before, after
        self._forwarded: dict[Pool, tuple[object, bytes, bytes]] = {}

    def begins(self, data: bytes) -> tuple[int, int] | None:
        """Where the body starts if `data` begins with this head, and how many bytes of it are missing (below zero:
        there are more than it has); else None."""
        if not data.startswith(self._before):
            return None
        at = len(self._before)
        end = data.find(b"\r", at, at + 12)
        digits = data[at:end]
        if end < 0 or not digits.isdigit() or not data.startswith(self._after, end):
            return None
        body = end + len(self._after)
        return body, int(digits) - len(data) + body

    def forwarded(self, pool: Pool, rules: object) -> tuple[bytes, bytes] | None:
        """What stands before the request id and between it and the length, as remembered under the same rules."""
        known = self._forwarded.get(pool)
        return (known[1], known[2]) if known is not None and known[0] is rules else None

    def remember(self, pool: Pool, rules: object, before: bytes, between: bytes) -> None:
        if len(self._forwarded) >= _MOST_POOLS:
            self._forwarded.clear()
        self._forwarded[pool] = (rules, before, between)


def learn(data: bytes, scope: Any) -> RequestHead | None:
    """The template that the request in `data`, which a parser has accepted, gives; None where it gives none."""
    end = data.find(b"\r\n\r\n") + 4
    lower = data[:end].lower()
    if end < 4 or lower.count(_LENGTH) != 1 or scope["http_version"] != "1.1":
        return None
    names = [name for name, _ in scope["headers"]]
    if not _UNSAFE.isdisjoint(names) and not _harmless(scope["headers"]):
        return None
    at = lower.index(_LENGTH) + len(_LENGTH)
    while data[at] == 0x20:
        at += 1
    head = RequestHead({**scope, "extensions": {}}, data[:at], data[data.index(b"\r", at) : end])
    found = head.begins(data)
    return head if found is not None and found[1] >= 0 else None


def target(url: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request line; of an absolute URL those it has, and the root of what is none."""
    if not url.startswith(b"/"):
        try:
            parsed: Any = httptools.parse_url(url)  # its stubs know no None, which most of its fields may be
            url = (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
        except httptools.HttpParserInvalidURLError:
            url = b"/"
    path, _, query = url.partition(b"#")[0].partition(b"?")
    return path, query


def without_upgrade(method: bytes, url: bytes, headers: Headers) -> bytes:
    """The head of a request for HTTP/1.1 as it is when the protocol that it would rather speak is ignored."""
    lines = [method, b" ", url, b" HTTP/1.1\r\n"]
    for name, value in headers:
        if name not in _OF_AN_UPGRADE:
            lines += [name, b": ", value, b"\r\n"]
    lines.append(b"\r\n")
    return b"".join(lines)


def _harmless(headers: Any) -> bool:
    """Whether the only unusual thing is a connection that is kept alive, which official clients say on every call."""
    return all(name not in _UNSAFE or (name == b"connection" and value == b"keep-alive") for name, value in headers)
