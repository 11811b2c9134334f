"""Work that comes back from where it was sent: taken back by the core, or lost behind a port that is shut."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from gateway.exchange import Exchange
from loadtests.faults import Command
from loadtests.replica import Fleet, ReplicaSettings
from policies.model import Abort, Dispatch, Prediction
from tests.gateway.running import Running, running, until


def to(replica_id: str) -> Dispatch:
    return Dispatch("r1", replica_id, "load", Prediction(0.1, 0.01, 10, 0, None), ())


async def sent(
    g: Running, request: Coroutine[Any, Any, httpx.Response]
) -> tuple[asyncio.Task[httpx.Response], Exchange]:
    """The request under way, and its exchange once it went to a replica; it is the only one."""
    asked = asyncio.create_task(request)
    await until(lambda: any(not e.held and e.record.attempts for e in g.gateway.proxy.live))
    (exchange,) = g.gateway.proxy.live
    return asked, exchange


async def test_a_decision_taken_back_before_it_was_followed_leaves_nothing_behind() -> None:
    async with Fleet.of(ReplicaSettings(), 2) as fleet, running(*fleet.urls, health={"hang_s": 600.0}) as g:
        for member in fleet.members:
            member.order(Command("hang"))
        asked, exchange = await sent(g, g.chat(stream=False))
        first = exchange.record.attempts[0].replica_id
        other = "r1" if first == "r0" else "r0"
        exchange.on_decision(Abort(exchange.record.request_id, "taken_back", requeue=True))
        await until(lambda: exchange.held)
        exchange.on_decision(to(other))
        exchange.on_decision(Abort(exchange.record.request_id, "taken_back", requeue=True))
        exchange.on_decision(to(first))
        for member in fleet.members:
            member.order(Command("clear"))
        answer = await asked
    assert answer.status_code == 200
    assert [a.replica_id for a in exchange.record.attempts] == [first, first]
    assert [a.detail for a in exchange.record.attempts] == ["preempted", ""]


@pytest.mark.plain
async def test_a_request_held_by_a_replica_that_shut_its_port_is_tried_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = {"hang_s": 600.0}  # the heartbeat would find it too
    async with Fleet.of(ReplicaSettings(), 2) as fleet, running(*fleet.urls, health=never) as g:
        for member in fleet.members:
            member.order(Command("hang"))
        asked, exchange = await sent(g, g.chat(stream=False))
        first = exchange.record.attempts[0].replica_id
        other = fleet.members[1 if first == "r0" else 0]
        other.order(Command("clear"))
        monkeypatch.setattr(g.gateway.fleet.health, "shut", lambda now: [first])
        answer = await asked
    assert answer.status_code == 200
    assert [a.detail for a in exchange.record.attempts] == ["first_event_timeout", ""]
    assert {a.replica_id for a in exchange.record.attempts} == {"r0", "r1"}


async def test_a_stream_that_fell_silent_behind_a_shut_port_ends_with_an_error() -> None:
    async with Fleet.of(ReplicaSettings(), 1) as fleet, running(*fleet.urls) as g:
        asked = asyncio.create_task(g.chat(stream=True, max_tokens=4000, ignore_eos=True))
        await until(lambda: any(e.relay and e.relay.content_events for e in g.gateway.proxy.live))
        exchange: Exchange = next(iter(g.gateway.proxy.live))
        assert exchange.relay is not None
        g.gateway.proxy.give_up_on("r0", exchange.relay.first_at)  # it has spoken since: it is left
        await until(lambda: exchange.relay is not None and exchange.relay.content_events > 20)
        g.gateway.proxy.give_up_on("r0", math.inf)
        answer = await asked
    assert answer.text.count('"error"') == 1
    assert (exchange.record.outcome, exchange.record.reason) == ("truncated", "idle_timeout")


async def test_a_request_whose_objective_passed_on_a_hung_replica_is_answered_late_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet = {"health": {"hang_s": 600.0}, "policy": {"name": "forebay"}}
    async with Fleet.of(ReplicaSettings(), 2) as fleet, running(*fleet.urls, **quiet) as g:
        for member in fleet.members:
            member.order(Command("hang"))
        body = {"model": "sim", "messages": [{"role": "user", "content": "now"}], "max_tokens": 2, "stream": True}
        headers = {"x-slo-ttft-ms": "400"}
        asked, exchange = await sent(g, g.http.post("/v1/chat/completions", json=body, headers=headers))
        assert exchange.admission is not None
        objective = exchange.admission.request.ttft_deadline
        assert objective is not None
        await until(lambda: time.monotonic() > objective)
        first = exchange.record.attempts[0].replica_id
        fleet.members[1 if first == "r0" else 0].order(Command("clear"))
        g.gateway.proxy.give_up_on(first)
        answer = await asked
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")
    assert [a.detail for a in exchange.record.attempts] == ["first_event_timeout", ""]
