"""A tap between the gateway and a replica: what a replica sent, byte for byte, beside what the client got."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit


class Tap:
    """Forwards connections to `upstream`; `answers` are the bytes that came back, one buffer per connection."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        assert parts.hostname is not None
        self.upstream = parts.hostname, parts.port or 80
        self.answers: list[bytearray] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                replica = socket.create_connection(self.upstream)
                kept = bytearray()
                self.answers.append(kept)
                threading.Thread(target=_pump, args=(client, replica, None), daemon=True).start()
                threading.Thread(target=_pump, args=(replica, client, kept), daemon=True).start()

    def streams(self) -> list[bytes]:
        """Bodies of the event streams that were answered, chunk framing removed."""
        return [body for kept in self.answers for head, body in _answers(bytes(kept)) if b"text/event-stream" in head]


def _pump(source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if kept is not None:
                kept += data
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def _answers(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(head, body) of each whole answer on one connection."""
    while b"\r\n\r\n" in data:
        head, _, data = data.partition(b"\r\n\r\n")
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            body = b""
            while True:
                size, _, data = data.partition(b"\r\n")
                length = int(size, 16)
                body, data = body + data[:length], data[length + 2 :]
                if length == 0:
                    break
        else:
            length = int(lower.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            body, data = data[:length], data[length:]
        yield lower, body
