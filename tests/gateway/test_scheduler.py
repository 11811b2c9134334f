"""The shell around the core: decisions reach their owners, time reaches the core, pulses say what streams do."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.pulses import Meter
from gateway.record import RequestRecord
from gateway.scheduler import Scheduler
from policies import registry
from policies.core import Balancer
from policies.model import (
    Abort,
    Added,
    Decision,
    Dispatch,
    Hold,
    Outcome,
    Pulse,
    Request,
    Scraped,
    Shed,
    Usage,
)
from policies.settings import Settings


class Core:
    """A core that holds everything until it is woken."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.due: float | None = None
        self.pulses: list[tuple[str, Pulse]] = []
        self.answers: list[Decision] = []

    def submit(self, request: Request, now: float) -> list[Decision]:
        self.due = now + 0.02
        return [Hold(request.id, now + 0.02)]

    def wake(self, now: float) -> list[Decision]:
        assert self.due is not None
        assert now >= self.due - 0.002
        self.due = None
        return [Dispatch("one", "r0", "late")]

    def next_wake(self) -> float | None:
        return self.due

    def prefilling(self, replica_id: str) -> bool:
        return True

    def pulse(self, replica_id: str, pulse: Pulse, now: float) -> list[Decision]:
        self.pulses.append((replica_id, pulse))
        answers, self.answers = self.answers, []
        return answers

    def complete(self, request_id: str, outcome: Outcome, usage: Usage | None, now: float) -> list[Decision]:
        self.calls.append(("complete", (request_id, outcome)))
        return []

    def cancel(self, request_id: str, now: float) -> list[Decision]:
        self.calls.append(("cancel", request_id))
        return []


@dataclass
class Waiting:
    decisions: list[Decision] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    record: RequestRecord = field(default_factory=lambda: RequestRecord("req-1", 0.0))

    def on_decision(self, decision: Decision) -> None:
        self.decisions.append(decision)
        self.changed.set()


@dataclass(eq=False)
class Stream:
    tpot_s: float | None
    first_at: float
    content_events: int


@pytest.mark.plain
async def test_a_held_request_is_woken_when_the_core_said() -> None:
    core: Any = Core()
    scheduler = Scheduler(core)
    scheduler.start()
    owner = Waiting()
    scheduler.submit(Request("one"), owner)
    assert [type(d) for d in owner.decisions] == [Hold]
    assert scheduler.held == 1
    owner.changed.clear()
    await asyncio.wait_for(owner.changed.wait(), 5)
    assert isinstance(owner.decisions[-1], Dispatch)
    assert scheduler.held == 0
    scheduler.complete("one", Outcome.CANCELLED, None, "r0")
    assert core.calls == [("cancel", "one")]
    assert scheduler.open == 0
    scheduler.stop()


@pytest.mark.plain
async def test_decisions_caused_by_others_reach_their_owner() -> None:
    core: Any = Core()
    scheduler = Scheduler(core)
    scheduler.start()
    owner = Waiting()
    scheduler.submit(Request("one"), owner)
    core.due = None
    scheduler.dispatched("r0").live.add(Stream(0.1, 0.0, 5))
    core.answers = [Abort("one", "preempted", requeue=True)]
    owner.changed.clear()
    await asyncio.wait_for(owner.changed.wait(), 5)
    assert isinstance(owner.decisions[-1], Abort)
    assert scheduler.held == 1
    core.answers = [Shed("one", "infeasible", 2.0)]
    owner.changed.clear()
    await asyncio.wait_for(owner.changed.wait(), 5)
    assert isinstance(owner.decisions[-1], Shed)
    assert (scheduler.held, scheduler.open) == (0, 0)
    scheduler.stop()


@pytest.mark.plain
async def test_a_tick_that_fails_is_not_the_last() -> None:
    """Deadlines of all requests are looked at in ticks."""
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    core: Any = Core()
    scheduler = Scheduler(core)
    scheduler.start()
    ticked = asyncio.Event()
    trouble = [ZeroDivisionError(), ZeroDivisionError()]

    def on_tick(now: float) -> bool:
        if trouble:
            raise trouble[-1]
        ticked.set()
        return False

    scheduler.on_tick = on_tick
    scheduler.submit(Request("one"), Waiting())
    async with asyncio.timeout(60):
        while not told:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        trouble.clear()
        await ticked.wait()
    assert isinstance(told[0], ZeroDivisionError)
    scheduler.stop()


async def test_over_the_real_core() -> None:
    balancer = Balancer({}, registry.make("round_robin"), Settings().without_science(), random.Random(0))
    scheduler = Scheduler(balancer)
    scheduler.start()
    for replica in ("r0", "r1"):
        scheduler.fleet_event(Added(replica))
    owners = [Waiting() for _ in range(4)]
    for i, owner in enumerate(owners):
        scheduler.submit(Request(f"q{i}"), owner)
    assert [d.replica_id for o in owners for d in o.decisions if isinstance(d, Dispatch)] == ["r0", "r1", "r0", "r1"]
    for i, replica in ((0, "r0"), (1, "r1"), (2, "r0")):
        scheduler.complete(f"q{i}", Outcome.SUCCESS, Usage(1, 1, 0), replica)
    scheduler.failed("q3", Outcome.ERROR)
    assert isinstance(owners[3].decisions[-1], Dispatch)
    scheduler.complete("q3", Outcome.CANCELLED, None, "r0")
    assert sum(r.ledger.in_flight for r in balancer.fleet.replicas.values()) == 0
    scheduler.stop()


def test_a_pulse_counts_streams_that_run_near_their_own_pace() -> None:
    meter = Meter("r0")
    meter.live = {
        Stream(0.1, 0.0, 20),  # 1 s / 20 = 50 ms a token
        Stream(0.1, 0.0, 11),  # 91 ms: above 0.85 of its objective
        Stream(0.1, 0.0, 3),  # too young to say
        Stream(None, 0.0, 20),  # no objective
    }
    meter.idle_gaps, meter.idle_sum_s, meter.busy_gaps, meter.busy_sum_s = 3, 0.06, 2, 0.4
    pulse = meter.pulse(now=1.0)
    assert (pulse.live, pulse.near) == (4, 1)
    assert pulse.least_slack_s is not None
    assert round(pulse.least_slack_s, 4) == 0.0091
    assert (pulse.idle_gaps, pulse.idle_gap_sum_s, pulse.busy_gaps, pulse.busy_gap_sum_s) == (3, 0.06, 2, 0.4)
    assert meter.pulse(1.0).idle_gaps == 0


def test_tokens_per_event_are_learnt_from_usage_and_from_scrapes() -> None:
    meter = Meter("r0")
    for _ in range(200):
        meter.ended(content_events=50, completion_tokens=200)
    assert round(meter.tokens_per_event, 2) == 4.0
    scraped = Meter("r1")
    for second in range(200):
        scraped.scraped(Scraped("r1", generation_tokens=second * 200.0))
        scraped.events_total += 100
    assert round(scraped.tokens_per_event, 2) == 2.0
    scraped.scraped(Scraped("r1", generation_tokens=None))
    scraped.scraped(Scraped("r1", generation_tokens=10.0))  # a restart teaches nothing
    assert round(scraped.tokens_per_event, 2) == 2.0


def test_where_usage_speaks_the_scrape_is_not_asked() -> None:
    """The replica's counter holds what others had from it as well."""
    meter = Meter("r0")
    for second in range(100):
        meter.ended(content_events=100, completion_tokens=200)
        meter.scraped(Scraped("r0", generation_tokens=second * 1000.0))
    assert round(meter.tokens_per_event, 2) == 2.0


def test_the_first_answer_says_how_many_tokens_an_event_carries() -> None:
    """Counted as one token each, events of four made streams look four times too slow and closed the pace."""
    meter = Meter("r")
    meter.idle_gaps, meter.idle_sum_s = 10, 0.8
    assert meter.pulse(1.0).idle_gaps == 10
    meter.ended(content_events=25, completion_tokens=100)
    assert meter.tokens_per_event == 4.0
    meter.idle_gaps, meter.idle_sum_s = 10, 0.8
    assert meter.pulse(1.0).idle_gaps == 40  # 20 ms a token
