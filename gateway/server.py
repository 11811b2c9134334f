"""Runs a `Gateway`, or a `Hand` of one, on uvicorn: sockets, signals, and an end that loses nothing.

SIGTERM or Ctrl-C: /ready turns 503 and new requests are refused while the port stays open, so that load balancers can
notice; held requests are told to go elsewhere; streams finish within `drain_s`, then the rest is cut. A second signal
stops at once. SIGHUP reads the configuration again. A process that is replaced (`retire`) takes no new connections,
finishes what it has within the same bound, and is not told of by /ready: others listen on the same port.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import uvicorn

from gateway import collecting, wire
from gateway.config import Config, ConfigError
from gateway.proxy import Proxy

log = logging.getLogger("forebay")
LEAVE_IDLE_S = 1.0  # a client that has just had an answer may be sending the next request
CUT_S = 2  # for streams that are cut at the end of the drain
UNUSED = (signal.SIGUSR1, signal.SIGUSR2)  # would end the process and cut its streams


class Served(Protocol):
    """What runs on a server: `app.Gateway` or `hand.Hand`."""

    @property
    def proxy(self) -> Proxy: ...

    @property
    def config(self) -> Config: ...

    @property
    def open_requests(self) -> int: ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...

    async def start(self) -> None: ...

    def drain(self) -> None: ...

    def cut(self) -> None: ...

    async def stop(self) -> None: ...

    def reload(self) -> None:
        """Raises ConfigError."""


class Server(uvicorn.Server):
    def __init__(self, gateway: Served) -> None:
        config = gateway.config
        super().__init__(
            uvicorn.Config(
                gateway,
                loop="uvloop",
                http=wire.protocol(
                    max_header_bytes=config.limits.max_header_bytes,
                    body_timeout_s=config.limits.body_timeout_s,
                    client_stall_s=config.timeouts.client_stall_s,
                    proxied=gateway.proxy,
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=True,
                proxy_headers=False,
                backlog=config.listen.backlog_connections,
                timeout_keep_alive=round(config.listen.keep_alive_s),
                timeout_graceful_shutdown=CUT_S,
            )
        )
        self.gateway = gateway
        self._drain_until: float | None = None
        self._retiring = False
        self.beats: Callable[[], None] | None = None  # called when it listens
        self.supervised = False  # another process speaks for it, and tells it of Ctrl-C

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.gateway.start()
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        if not self.supervised:
            for unused in UNUSED:
                loop.add_signal_handler(unused, self._not_done, unused)
        collecting.settle()
        if self.beats is not None:
            self.beats()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for known in (signal.SIGHUP, *(() if self.supervised else UNUSED)):
            asyncio.get_running_loop().remove_signal_handler(known)
        self.gateway.cut()
        await super().shutdown(sockets)
        await self.gateway.stop()  # not as a lifespan event: uvicorn leaves those out when it is forced

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.supervised and sig == signal.SIGINT:
            return
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self.gateway.config.listen.drain_s
        else:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._drain_until is not None and not self.should_exit:
            if not self.gateway.proxy.draining and not self._retiring:
                self.gateway.drain()
                if not self.supervised:
                    log.info(
                        "stopping: %d requests may finish; a second signal stops at once", self.gateway.open_requests
                    )
            if self._retiring:
                for connection in list(self.server_state.connections):
                    connection.leave(LEAVE_IDLE_S)  # type: ignore[union-attr]
            late = time.monotonic() >= self._drain_until
            if late and self.gateway.open_requests:
                log.warning("stopping: %d requests did not finish in time and are cut", self.gateway.open_requests)
            idle = self.gateway.open_requests == 0 and not (self._retiring and self.server_state.connections)
            self.should_exit = late or idle
        return await super().on_tick(counter)

    def retire(self) -> None:
        """Another process listens in its place: connections end with the answers they wait for."""
        if self._drain_until is None:
            self._retiring = True
            self._drain_until = time.monotonic() + self.gateway.config.listen.drain_s
            self.gateway.proxy.leaving = True
            for server in self.servers:
                server.close()

    def _not_done(self, sig: signal.Signals) -> None:
        log.warning("%s: nothing is done; it replaces the program only where it runs with --workers", sig.name)

    def _reload(self) -> None:
        try:
            self.gateway.reload()
        except ConfigError as e:
            for line in e.lines:
                log.error("reload refused: %s", line)


def listen(config: Config, port: int | None = None) -> socket.socket:
    """The bound socket; of several workers each has its own at one `port`. Raises OSError."""
    host, port = config.listen.host, config.listen.port if port is None else port
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if config.workers.count > 1:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"
