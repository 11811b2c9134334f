"""A TCP forwarder that can fall silent: what goes through it is neither delivered nor refused until it is opened again.

It stands for a network that drops packets. What differs from a real one: a connect is taken by the forwarder itself, so
it succeeds and then hears nothing, where a dropped SYN hears nothing at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Valve:
    """Runs on a loop of its own thread. `port` is where it listens."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def shut(self) -> None:
        self._loop.call_soon_threadsafe(self._open.clear)

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)

    async def serve(self, listening: threading.Event, over: asyncio.Event) -> None:
        server = await asyncio.start_server(self._taken, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        listening.set()
        await over.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._open.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
            try:
                await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
            finally:
                back.close()
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone, or the test is over
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        await self._open.wait()
        with suppress(OSError):
            writer.write_eof()


@contextmanager
def valve(target: int) -> Iterator[Valve]:
    made = Valve(target)
    over, listening = asyncio.Event(), threading.Event()
    thread = threading.Thread(target=lambda: made._loop.run_until_complete(made.serve(listening, over)), daemon=True)
    thread.start()
    assert listening.wait(30)
    try:
        yield made
    finally:
        made._loop.call_soon_threadsafe(over.set)
        thread.join(30)
        made._loop.close()
