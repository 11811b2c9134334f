"""The connections to one replica: reused newest first, retired before vLLM closes them.

vLLM drops a connection that was idle for 5 s; ours are dropped after `idle_s` (3.5 s), so that a reused one is alive
almost always. Newest first keeps few connections warm and lets the others age out. Proxy environment variables play no
part: the address is the replica's, or the attempt fails. TLS verifies against the system's or a private authority.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from dataclasses import dataclass
from urllib.parse import urlsplit

from gateway.http1 import UpstreamConnection


@dataclass(slots=True, frozen=True)
class PoolStats:
    open: int
    idle: int
    connects: int
    failed_connects: int
    requests_on_reused: int


class Pool:
    """Connections to the replica at `url` (http or https, optional path prefix, IPv6 in brackets)."""

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float | None = 2.0,  # None: whoever asks has a bound of his own
        idle_s: float = 3.5,
        ca_file: str | None = None,
        key: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"replica url {url!r}: must be http://HOST[:PORT][/PREFIX] or https://...")
        self.url = url
        self.host: str = parts.hostname
        self.is_address = ":" in self.host or self.host.replace(".", "").isdigit()  # and no name to be looked up
        self.tls = parts.scheme == "https"
        self.port = parts.port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/").encode()
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self.authorization = None if key is None else b"Bearer " + key.encode()
        self.connect_timeout_s = connect_timeout_s
        self.idle_s = idle_s
        self._ca_file = ca_file
        self._ssl: ssl.SSLContext | None = None
        self._idle: deque[UpstreamConnection] = deque()
        self._all: set[UpstreamConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._connects = self._failed = self._reused = 0

    @property
    def stats(self) -> PoolStats:
        return PoolStats(len(self._all), len(self._idle), self._connects, self._failed, self._reused)

    def take(self) -> UpstreamConnection | None:
        """An idle connection that is young enough and still alive, or None: then `connecting.connect`."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if time.monotonic() - connection.idle_since >= self.idle_s:
                idle.append(connection)
                self._retire()
                return None
            if connection.transport.is_closing() or connection.spoilt():
                connection.close()
                continue
            self._reused += 1
            return connection
        return None

    def secured(self) -> ssl.SSLContext | None:
        """What TLS is spoken with; None: without."""
        if self.tls and self._ssl is None:
            self._ssl = ssl.create_default_context(cafile=self._ca_file)
            self._ssl.set_alpn_protocols(["http/1.1"])
        return self._ssl

    def opened(self, connection: UpstreamConnection) -> None:
        """One more, for whoever asked."""
        self._connects += 1
        self._all.add(connection)

    def failed(self) -> None:
        self._failed += 1

    def give(self, connection: UpstreamConnection) -> None:
        """Takes a connection back whose response has ended cleanly, or that was not needed."""
        if self._closed or connection.closed:
            connection.close()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.idle_s, self._retire)

    def forget(self, connection: UpstreamConnection) -> None:
        """Called by a connection that closes."""
        self._all.discard(connection)
        try:
            self._idle.remove(connection)
        except ValueError:
            return

    def close(self) -> None:
        """Closes idle connections; those in use close when their response ends."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._idle:
            self._idle.pop().close()

    def _retire(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        while self._idle and now - self._idle[0].idle_since >= self.idle_s:
            self._idle.popleft().close()
        if self._idle and not self._closed:
            due = self._idle[0].idle_since + self.idle_s - now
            self._timer = asyncio.get_running_loop().call_later(max(0.01, due), self._retire)
