"""Ports that stay one's own although nobody listens on them yet, or any more.

A port that was looked up and let go again may be given to any other program before the server that it was meant for
listens. So it is held: bound, never listening, and marked for re-use (SO_REUSEADDR) only afterwards. Then Linux gives
it to nobody who asks for any port, refuses connects to it, and lets a server that sets SO_REUSEADDR listen there.
Trade-off: a program that does not set it (none here) cannot have the port, and each costs a file descriptor.
"""

from __future__ import annotations

import contextlib
import socket

_held: list[socket.socket] = []  # until this process ends


def hold(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Holds `port` until the socket is closed; 0: a free one. Raises OSError where another has it."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock


def free_ports(count: int) -> list[int]:
    """So many ports of this process's own, as long as it lives."""
    made = [hold() for _ in range(count)]
    _held.extend(made)
    return [sock.getsockname()[1] for sock in made]


def run_of_ports(count: int) -> int:
    """The first of so many consecutive ones, as `forebay replica` takes them."""
    while True:
        (base,) = free_ports(1)
        with contextlib.suppress(OSError, OverflowError):
            _held.extend([hold(port=port) for port in range(base + 1, base + count)])
            return base
