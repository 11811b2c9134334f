"""A replica of several engines (data parallel): one that hangs is seen although the sum of their steps goes on."""

from __future__ import annotations

import asyncio

from gateway.health import FleetHealth
from gateway.sections import Health
from gateway.vllm_metrics import read
from policies.model import Ejected, FleetEvent
from tests.gateway.scripted import CHAT, Connection, Seen, gateway, replica, until
from tests.gateway.test_failures import STREAM_HEAD, event

HANG_S = 10.0


def page(*engines: tuple[int, int, int]) -> str:
    """/metrics of engines with (running, waiting, steps)."""
    lines = []
    for n, (running, waiting, steps) in enumerate(engines):
        label = f'{{engine="{n}",model_name="m"}}'
        lines += [f"vllm:num_requests_running{label} {running}", f"vllm:num_requests_waiting{label} {waiting}"]
        lines += [f"vllm:iteration_tokens_total_count{label} {steps}", f"vllm:generation_tokens_total{label} {steps}"]
    return "\n".join(lines)


class Replica:
    """One replica, scraped once a second."""

    def __init__(self) -> None:
        self.health = FleetHealth(Health(hang_s=HANG_S))
        self.health.add("a", 0.0)
        self.health.probed("a", None, 0.0)

    def scraped(self, now: float, *engines: tuple[int, int, int], silent: int = 1) -> list[FleetEvent]:
        return self.health.scraped(read(page(*engines), "a", now), 4, now, silent)[0]


def test_each_engine_is_read_and_a_single_one_needs_no_list() -> None:
    assert read(page((2, 1, 50), (0, 0, 7)), "a", 0.0).engines == (("0", 3.0, 50.0), ("1", 0.0, 7.0))
    assert read(page((2, 1, 50)), "a", 0.0).engines == ()


def test_one_engine_that_stands_still_with_work_is_hung() -> None:
    r = Replica()
    for second in range(11):
        assert r.scraped(float(second), (3, 0, 100 + second), (2, 0, 40)) == []
    assert r.scraped(11.0, (3, 0, 111), (2, 0, 40)) == [Ejected("a", "hung", statistical=False)]


def test_an_engine_without_work_or_without_anybody_waiting_for_it_is_not() -> None:
    r = Replica()
    for second in range(30):
        assert r.scraped(float(second), (3, 0, 100 + second), (0, 0, 40)) == []  # idle
    for second in range(30, 60):  # its gauge is stale after an abort: every stream we know moves
        assert r.scraped(float(second), (3, 0, 100 + second), (1, 0, 40), silent=0) == []


def test_a_step_in_between_starts_the_time_anew() -> None:
    r = Replica()
    for second in range(9):
        r.scraped(float(second), (3, 0, second), (2, 0, 40))
    for second in range(9, 20):
        assert r.scraped(float(second), (3, 0, second), (2, 0, 41)) == []
    assert r.scraped(20.0, (3, 0, 20), (2, 0, 41)) == [Ejected("a", "hung", statistical=False)]


async def test_a_stream_that_has_begun_and_says_nothing_is_silent() -> None:
    said, more = asyncio.Event(), asyncio.Event()

    async def script(connection: Connection, request: Seen) -> None:
        await connection.send(STREAM_HEAD)
        await more.wait()
        await connection.send(event("first"))
        said.set()
        await connection.peer_left()

    async with replica(script) as a, gateway(a) as g:
        client = await g.connect()
        await client.post("/v1/chat/completions", CHAT)
        await until(lambda: a.seen)
        assert g.proxy.silent("r0", 0.0) == 0  # it may wait in the engine's queue
        more.set()
        await said.wait()
        await client.reader.readuntil(b"first")
        assert g.proxy.silent("r0", 3600.0) == 0
        await until(lambda: g.proxy.silent("r0", 0.05) == 1)
        assert g.proxy.silent("r1", 0.0) == 0
        client.close()
