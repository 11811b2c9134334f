"""Policies are switched while clients stream: nobody notices, and nothing is left over."""

from __future__ import annotations

import asyncio

from loadtests.replica import Fleet, ReplicaSettings
from policies import POLICIES
from tests.gateway.running import Running, running, until


async def client(g: Running, n: int, over: asyncio.Event) -> list[str]:
    seen = []
    while not over.is_set():
        messages = [{"role": "user", "content": f"conversation {n} " * 40}]
        answer = await g.chat(stream=n % 2 == 0, max_tokens=8, messages=messages)
        seen.append("whole" if answer.status_code == 200 and "error" not in answer.text else answer.text)
    return seen


async def test_every_policy_takes_over_from_every_other_under_load() -> None:
    async with Fleet.of(ReplicaSettings(time_scale=20.0), 3) as sim, running(*sim.urls) as g:
        over = asyncio.Event()
        clients = [asyncio.create_task(client(g, n, over)) for n in range(4)]
        arms = [*POLICIES, "least_request+admission+pacing", "forebay", "round_robin"]
        for name in arms:
            switched = await g.http.put("/admin/policy", json={"name": name})
            assert switched.status_code == 200, switched.text
            policy = name.split("+")[0]
            seen = g.gateway.metrics.counted.choices
            had = sum(n for (of, _), n in seen.items() if of == policy)
            await until(lambda: sum(n for (of, _), n in seen.items() if of == policy) > had)  # noqa: B023
        over.set()
        answers = [one for done in await asyncio.gather(*clients) for one in done]
        assert set(answers) == {"whole"}
        core = g.gateway.balancer
        assert sum(r.ledger.in_flight for r in core.fleet.replicas.values()) == 0
        assert core.snapshot()["held_bytes"] == 0
        assert g.gateway.scheduler.open == 0
        assert len((await g.http.get("/admin/versions")).json()) == 10
