"""Which headers go on, which stay, and which are ours: RFC 9110 section 7.6 and the forwarded family.

Hop-by-hop headers and those that Connection names never pass. Host names the replica; content-length is made anew.
`x-request-id` is accepted or made, forwarded and echoed. `x-forwarded-*` and `forwarded` of untrusted peers are
replaced, those of trusted proxies kept and extended. accept-encoding is dropped: the stream has to be read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from itertools import count

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings",
    }
)  # fmt: skip
_REPLACED = frozenset({b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id"})
_FORWARDED = frozenset(
    {b"forwarded", b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"x-forwarded-port", b"x-real-ip"}
)
_NOT_FORWARDED = HOP_BY_HOP | _REPLACED | _FORWARDED
_NOT_RETURNED = HOP_BY_HOP | {b"content-length", b"x-request-id"}
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,200}")
_PREFIX = os.urandom(8).hex().encode()
_numbers = count(1)


def _other_prefix() -> None:
    global _PREFIX
    _PREFIX = os.urandom(8).hex().encode()


os.register_at_fork(after_in_child=_other_prefix)  # hands are forks: each would number with the prefix of all others


def request_id(given: bytes | None) -> bytes:
    """The client's id where it is printable and short, else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return b"%b%08x" % (_PREFIX, next(_numbers))


def upstream(
    headers: Headers,
    *,
    peer: str,
    scheme: str,
    trusted: Collection[str] = (),
    authorization: bytes | None = None,
    drop_authorization: bool = False,
) -> list[bytes]:
    """Header lines of the forwarded request, each ending in CRLF, but for host, request id and length."""
    lines: list[bytes] = []
    named: list[bytes] = []
    kept: dict[bytes, list[bytes]] = {}
    host = b""
    for name, value in headers:
        if name not in _NOT_FORWARDED:
            if name in (b"authorization", b"x-api-key") and (drop_authorization or authorization is not None):
                continue
            lines += (name, b": ", value, b"\r\n")
        elif name == b"connection":
            named += [n for token in value.split(b",") if (n := token.strip().lower()) not in _NOT_FORWARDED]
        elif name == b"host":
            host = value
        elif name in _FORWARDED:
            kept.setdefault(name, []).append(value)
    if named:
        lines = _without(lines, {n for n in named if n not in (b"close", b"")})
    if authorization is not None:
        lines += (b"authorization: ", authorization, b"\r\n")
    own = peer.encode()
    before = kept if kept and peer in trusted else {}
    chain = b", ".join([*before.get(b"x-forwarded-for", []), own])
    proto = (before.get(b"x-forwarded-proto") or [scheme.encode()])[0]
    original = (before.get(b"x-forwarded-host") or [host])[0]
    lines += (b"x-forwarded-for: ", chain, b"\r\nx-forwarded-proto: ", proto, b"\r\n")
    if original:
        lines += (b"x-forwarded-host: ", original, b"\r\n")
    if b"forwarded" in before:
        node = b'"[%b]"' % own if b":" in own else own
        lines += (b"forwarded: ", b", ".join([*before[b"forwarded"], b"for=" + node]), b"\r\n")
    return lines


def split(lines: bytes) -> Headers:
    """Joined header lines as pairs."""
    return [(name, value) for name, _, value in [line.partition(b": ") for line in lines.split(b"\r\n")[:-1]]]


def _without(lines: list[bytes], names: set[bytes]) -> list[bytes]:
    """Header lines minus those that Connection declares hop-by-hop. The lines come in groups of four."""
    kept: list[bytes] = []
    for at in range(0, len(lines), 4):
        if lines[at] not in names:
            kept += lines[at : at + 4]
    return kept


def downstream(headers: Headers) -> Headers:
    """The replica's headers that go to the client."""
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named |= {token.strip().lower() for token in value.split(b",")}
    return [(name, value) for name, value in headers if name not in _NOT_RETURNED and name not in named]
