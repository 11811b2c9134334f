"""What the forked processes run: their event loop, their beat to the supervisor, and the end when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import uvloop

from gateway import banner, core_process
from gateway.config import Config
from gateway.core_process import Core
from gateway.hand import Hand
from gateway.server import Server, url

BEAT_S = 1.0


def core(
    config: Config,
    path: Path | None,
    overrides: Mapping[str, Any],
    link: str,
    line: socket.socket,
    again: bool,
    shown: socket.socket | None,
) -> None:
    """`shown`: a socket whose address is greeted with; it is not listened on here."""

    async def run() -> None:
        made = Core(config, path, overrides, again=again)
        leave = asyncio.Event()
        greeting = None
        if shown is not None:
            address = url(shown)
            shown.close()
            greeting = asyncio.create_task(banner.greet(made, address))
        beats = Beats(line, lambda: _when_alone(made, leave), lambda: b"%g " % made.config.listen.drain_s)
        await core_process.run(made, link, beats.start, leave)
        if greeting is not None:
            greeting.cancel()

    uvloop.run(run())


def hand(config: Config, slot: int, link: str, line: socket.socket, sock: socket.socket) -> None:
    async def run() -> None:
        server = Server(Hand(config, slot, link))
        beats = Beats(line, lambda: server.handle_exit(signal.SIGTERM, None))
        server.beats, server.supervised = beats.start, True
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, server.retire)
        await server.serve(sockets=[sock])

    uvloop.run(run())


class Beats:
    """A word a second to the supervisor, by default a dot; `orphaned` is called when it is gone."""

    def __init__(
        self, line: socket.socket, orphaned: Callable[[], None], word: Callable[[], bytes] = lambda: b". "
    ) -> None:
        self._line = line
        self._orphaned = orphaned
        self._word = word
        line.setblocking(False)

    def start(self) -> None:
        """From when the process is ready for work."""
        asyncio.get_running_loop().add_reader(self._line, self._read)
        self._beat()

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            self._line.send(self._word())
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not self._line.recv(64):
                asyncio.get_running_loop().remove_reader(self._line)
                self._orphaned()


def _when_alone(made: Core, leave: asyncio.Event) -> None:
    """The supervisor is gone: the hands finish what they have, then there is nothing left to decide."""
    if made.proxy.hands:
        asyncio.get_running_loop().call_later(BEAT_S, _when_alone, made, leave)
    else:
        leave.set()
