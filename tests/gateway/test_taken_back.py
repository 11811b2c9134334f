"""Work the core takes back and gives out again while the request is between two decisions: the last word counts."""

from __future__ import annotations

import asyncio

from gateway.exchange import Exchange
from loadtests.faults import Command
from loadtests.replica import Fleet, ReplicaSettings
from policies.model import Abort, Dispatch, Prediction
from tests.gateway.running import running, until


def to(replica_id: str) -> Dispatch:
    return Dispatch("r1", replica_id, "load", Prediction(0.1, 0.01, 10, 0, None), ())


async def test_a_decision_taken_back_before_it_was_followed_leaves_nothing_behind() -> None:
    async with Fleet.of(ReplicaSettings(), 2) as fleet, running(*fleet.urls) as g:
        for member in fleet.members:
            member.order(Command("hang"))
        asked = asyncio.create_task(g.chat(stream=False))
        await until(lambda: any(not e.held and e.record.attempts for e in g.gateway.proxy.live))
        exchange: Exchange = next(iter(g.gateway.proxy.live))
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
