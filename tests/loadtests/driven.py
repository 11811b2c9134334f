"""Runs of the live driver against a scripted server: by the clock, or by hand, where the story lets time pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import orjson

from loadtests.answer import Answer
from loadtests.client import Client, Target
from loadtests.drive import Behaviour, Clock, Driver, WireRequest
from loadtests.record import Record
from loadtests.schedule import Row, Schedule
from policies.model import ServiceClass
from tests.loadtests.scripted import Call, Script, Server, scripted

CHAT = "/v1/chat/completions"
LOOSE = ServiceClass("interactive", ttft_s=120.0, tpot_s=120.0)  # a busy machine is no part of a story


def row(id: int, at_s: float | None, **more: object) -> Row:
    return Row(id, at_s, 4, 3, (id,), **more)  # type: ignore[arg-type]


def build(row: Row) -> WireRequest:
    body = orjson.dumps({"id": row.id, "turn": row.turn, "max_tokens": row.output_tokens, "stream": True})
    return WireRequest(CHAT, body, {"x-request-id": f"t-{row.id}"}, forced_tokens=row.output_tokens)


async def drive(
    script: Script,
    rows: Sequence[Row],
    *,
    behaviour: Behaviour | None = None,
    service_class: ServiceClass = LOOSE,
    window_s: float = 1.0,
    drain_s: float = 120.0,
) -> tuple[list[Record], Driver, list[Call]]:
    schedule = Schedule(tuple(rows), window_s, drain_s, 512, {"interactive": service_class})
    async with scripted(script) as server:
        clock = Clock(time.perf_counter() + 0.02)
        driver = Driver(schedule, build, Client(Target.parse(server.url), clock.now), clock, behaviour)
        return await driver.run(), driver, server.calls


class HandClock(Clock):
    """Time passes when the story says so: then its end cannot depend on how busy the machine is."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.at_s = -1.0
        self.timers: list[tuple[float, asyncio.TimerHandle]] = []

    def now(self) -> float:
        return self.at_s

    def call_at(self, at_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        never = asyncio.TimerHandle(loop.time(), callback, (), loop)
        self.timers.append((at_s, never))
        self.advance(self.at_s)
        return never

    def advance(self, at_s: float) -> None:
        self.at_s = at_s
        for due in [timer for timer in self.timers if timer[0] <= at_s]:
            self.timers.remove(due)
            asyncio.get_running_loop().call_soon(lambda timer=due[1]: timer.cancelled() or timer._run())


class Watched(Client):
    """A client whose answers the story can see while they come in."""

    answers: list[Answer]

    async def send(self, path: str, body: bytes, answer: Answer, **more: object) -> dict[str, str]:  # type: ignore[override]
        self.answers.append(answer)
        return await super().send(path, body, answer, **more)  # type: ignore[arg-type]

    def begun(self) -> int:
        """Answers with content."""
        return sum(answer.first_content_at is not None for answer in self.answers)

    def ended(self) -> int:
        return sum(answer.ended_at is not None for answer in self.answers)


@asynccontextmanager
async def by_hand(
    script: Script,
    rows: Sequence[Row],
    *,
    behaviour: Behaviour | None = None,
    service_class: ServiceClass = LOOSE,
    window_s: float = 1.0,
    drain_s: float = 20.0,
) -> AsyncIterator[tuple[HandClock, Watched, asyncio.Task[list[Record]], Server]]:
    """A run under way whose clock stands at -1 s."""
    schedule = Schedule(tuple(rows), window_s, drain_s, 512, {"interactive": service_class})
    async with asyncio.timeout(120.0), scripted(script) as server:
        clock = HandClock()
        client = Watched(Target.parse(server.url), clock.now)
        client.answers = []
        running = asyncio.ensure_future(Driver(schedule, build, client, clock, behaviour).run())
        await asyncio.sleep(0)
        yield clock, client, running, server
