"""What one page of a replica costs the loop that decides: the gateway's own requests beside httpx, in turns.

CPU time of the thread per page, sockets and parsing of HTTP included, over a connection that stays, from a server in a
process of its own; and the longest that one page held the loop up. The page has the size of one of vLLM's.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from gateway.fetch import Fetcher
from gateway.replica import Replica

PAGE = b"vllm:num_requests_running 3\n" * 1800  # 50 KB
MOST_OF_HTTPX = 0.5
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over rounds, in microseconds."""

    page_us: float
    held_up_us: float


class _Slices:
    """The loop's turns that another coroutine sees: how long it was kept from running."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            self.longest_s, last = max(self.longest_s, now - last), now


def _serve(listening: socket.socket) -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b" % (len(PAGE), PAGE)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(whole)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        await (await asyncio.start_server(answer, sock=listening)).serve_forever()

    uvloop.run(run())


async def _cost(page: Callable[[], Awaitable[int]], pages: int) -> tuple[float, float]:
    await page()
    began = time.thread_time_ns()
    for _ in range(pages):
        if await page() != len(PAGE):
            raise RuntimeError("the page is not whole")
    each_us = (time.thread_time_ns() - began) / pages / 1000
    slices = _Slices()
    watching = asyncio.create_task(slices.watch())
    longest = []
    for _ in range(pages // 10):
        await asyncio.sleep(0)
        slices.longest_s = 0.0
        await page()
        longest.append(slices.longest_s)
    watching.cancel()
    return each_us, statistics.median(longest) * 1e6


async def _measure(url: str, pages: int, rounds: int) -> dict[str, Cost]:
    replica = Replica("r0", url)
    own = Fetcher(replica)
    limits = httpx.Limits(max_connections=8, keepalive_expiry=4.0)
    async with httpx.AsyncClient(trust_env=False, verify=False, limits=limits) as http:

        async def by_httpx() -> int:
            async with asyncio.timeout(TIMEOUT_S), http.stream("GET", f"{url}/metrics") as answer:
                return sum([len(part) async for part in answer.aiter_raw()])

        async def by_own() -> int:
            return len((await own.fetch("/metrics", TIMEOUT_S))[1])

        found: dict[str, list[tuple[float, float]]] = {"httpx": [], "gateway": []}
        for _ in range(rounds):
            found["httpx"].append(await _cost(by_httpx, pages))
            found["gateway"].append(await _cost(by_own, pages))
    own.close()
    return {
        name: Cost(statistics.median([page for page, _ in each]), statistics.median([held for _, held in each]))
        for name, each in found.items()
    }


def run(quick: bool, console: Console) -> bool:
    """Prints the table; True if the bar is met."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = multiprocessing.get_context("fork").Process(target=_serve, args=(listening,), daemon=True)
        server.start()
    try:
        with console.status("pages by httpx and by the gateway, in turns"):
            costs = uvloop.run(_measure(url, *((100, 3) if quick else (1000, 9))))
    finally:
        server.terminate()
        server.join()
    table = Table("", "CPU per page, us", "held up at most, us", title="one page of 50 KB")
    for name, cost in costs.items():
        table.add_row(name, f"{cost.page_us:.0f}", f"{cost.held_up_us:.0f}")
    ratio = costs["gateway"].page_us / costs["httpx"].page_us
    met = ratio <= MOST_OF_HTTPX
    console.print(table)
    console.print(f"gateway to httpx {ratio:.2f}, bar {MOST_OF_HTTPX:g}: {'[green]pass' if met else '[red]FAIL'}")
    return met
