"""A fleet and a gateway on this machine: simulated replicas in one process, the gateway in another.

For the demo, tests and trials: everything listens on free ports of 127.0.0.1 and ends with this process. Children
sit in their own session and with SIGINT blocked, so that Ctrl-C reaches only the parent; they stop when their pipe
closes, whatever became of the parent, so nothing is left behind. Instruments (simulated replicas, senders) stand for
other machines: where permitted they run at a higher priority than the rest of this one.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadtests.live_replica import ReplicaSettings

INSTRUMENT_NICE = -10
STOP_S = 5.0  # a child that has not left by then is killed


class PlaygroundError(RuntimeError):
    """A part of the playground did not start; the text is its reason."""


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Processes started inside never see Ctrl-C; one that arrives meanwhile is delivered here at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def instrument() -> None:
    """Raises the priority of this process, where it may; without the right nothing changes."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, INSTRUMENT_NICE)
    except PermissionError:
        return


@dataclass
class Playground:
    """`with Playground(settings, 4, overrides) as p: p.url, p.replica_urls`. Owns its two processes."""

    replicas: ReplicaSettings
    count: int = 4
    gateway: Mapping[str, Any] = field(default_factory=dict)  # configuration laid over the defaults
    replica_urls: list[str] = field(default_factory=list)
    url: str = ""
    _children: list[tuple[SpawnProcess, Connection]] = field(default_factory=list)

    def __enter__(self) -> Playground:
        try:
            self.replica_urls = self._start(_replicas, self.replicas, self.count)
            tables = {**self.gateway, "replicas": [{"url": one} for one in self.replica_urls]}
            tables["listen"] = {"host": "127.0.0.1", "port": 0, **tables.get("listen", {})}
            (self.url,) = self._start(_gateway, tables)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        with sigint_blocked():  # a second Ctrl-C must not leave a child behind
            for _, pipe in self._children:
                pipe.close()
            for process, _ in reversed(self._children):
                process.join(STOP_S)
                if process.is_alive():
                    process.kill()
                    process.join()
            self._children.clear()

    def _start(self, target: Callable[..., None], *arguments: object) -> list[str]:
        context = multiprocessing.get_context("spawn")
        with sigint_blocked():
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
            process.start()
            theirs.close()
            self._children.append((process, ours))
        try:
            urls: list[str] | str = ours.recv()
        except EOFError:
            raise PlaygroundError(f"{target.__name__.strip('_')}: the process ended before it listened") from None
        if isinstance(urls, str):
            raise PlaygroundError(f"{target.__name__.strip('_')}: {urls}")
        return urls


# -- in the children ---------------------------------------------------------------------------------------------------


def _replicas(pipe: Connection, settings: ReplicaSettings, count: int) -> None:
    import uvloop

    os.setsid()
    instrument()
    _told(pipe, lambda: uvloop.run(_run_replicas(pipe, settings, count)))


async def _run_replicas(pipe: Connection, settings: ReplicaSettings, count: int) -> None:
    from loadtests.replica import Fleet

    async with Fleet.of(settings, count) as fleet:
        gc.collect()
        gc.freeze()
        pipe.send(fleet.urls)
        await _closed(pipe)


def _gateway(pipe: Connection, tables: Mapping[str, Any]) -> None:
    import uvloop

    os.setsid()
    logging.basicConfig(level=logging.ERROR)
    _told(pipe, lambda: uvloop.run(_run_gateway(pipe, tables)))


async def _run_gateway(pipe: Connection, tables: Mapping[str, Any]) -> None:
    from gateway.app import Gateway
    from gateway.config import load
    from gateway.server import Server, listen, url

    settings = load(None, tables)
    gateway = Gateway(settings)
    sock = listen(settings)
    server = Server(gateway)
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    leaving = asyncio.ensure_future(_ready(gateway, pipe, url(sock)))
    await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    if leaving.done():
        leaving.result()
    else:
        leaving.cancel()


async def _ready(gateway: Any, pipe: Connection, address: str) -> None:
    """Tells the parent once all replicas are available, then waits for it to leave."""
    fleet = gateway.fleet
    while not (fleet.replicas and all(map(fleet.available, fleet.replicas))):  # noqa: ASYNC110 - it has no event for it
        await asyncio.sleep(0.02)
    pipe.send([address])
    await _closed(pipe)


async def _closed(pipe: Connection) -> None:
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), gone.set)
    await gone.wait()
    loop.remove_reader(pipe.fileno())


def _told(pipe: Connection, work: Callable[[], None]) -> None:
    """Runs the child's work; a failure is told to the parent in one line instead of a traceback."""
    try:
        work()
    except (BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        try:
            pipe.send(f"{type(error).__name__}: {error}")
        except OSError:
            return
