"""Replicas go wrong in the ways vLLM does, behind a whole gateway; clients must not notice, operators must."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from loadtests.faults import Command
from loadtests.replica import EngineConfig, Fleet, ReplicaSettings
from tests.gateway.running import Running, running, until

FAST = ReplicaSettings(EngineConfig(max_loras=1), time_scale=20.0, adapters=("lora",))


@pytest.fixture
async def two() -> AsyncIterator[Fleet]:
    async with Fleet.of(FAST, 2) as fleet:
        yield fleet


async def served_by(gateway: Running, times: int = 4) -> set[str]:
    """Which replicas answer now; every answer must be whole."""
    seen = set()
    for _ in range(times):
        answer = await gateway.chat()
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        seen.add(answer.headers["x-forebay-replica"])
    return seen


async def test_both_replicas_serve(two: Fleet) -> None:
    async with running(*two.urls) as g:
        assert await served_by(g) == {"r0", "r1"}


async def test_a_draining_replica_answers_fastest_and_is_out_after_its_first_abort(two: Fleet) -> None:
    async with running(*two.urls) as g:
        two.members[0].order(Command("drain"))
        assert await served_by(g) == {"r1"}  # the request that met the abort was tried again
        assert (g.phase("r0"), g.reason("r0")) == ("out", "abort")
        two.members[0].order(Command("restart"))
        await until(lambda: g.gateway.fleet.available("r0"))
        assert await served_by(g, 8) == {"r0", "r1"}
        assert g.phase("r0") == "in"


async def test_a_hung_engine_is_found_by_its_heartbeat_and_its_requests_go_elsewhere(two: Fleet) -> None:
    async with running(*two.urls) as g:
        two.members[0].order(Command("hang"))
        answers = await asyncio.gather(*(g.chat() for _ in range(4)))
        assert [a.headers["x-forebay-replica"] for a in answers] == ["r1"] * 4
        assert (g.phase("r0"), g.reason("r0")) == ("out", "hung")
        assert (await g.http.get(two.urls[0] + "/health")).status_code == 200
        two.members[0].order(Command("clear"))
        await until(lambda: g.gateway.fleet.available("r0"))


async def test_a_client_that_does_not_read_does_not_make_its_replica_look_hung(two: Fleet) -> None:
    async with running(two.urls[0]) as g:
        stream = asyncio.create_task(g.chat(stream=True, max_tokens=20_000, ignore_eos=True))
        await until(lambda: any(e.record.first_content_at for e in g.gateway.proxy.live))
        assert g.gateway.proxy.awaits("r0") == 1
        (exchange,) = g.gateway.proxy.live
        exchange.client.flow.write_paused = True  # as the transport does when the client's window is full
        assert g.gateway.proxy.awaits("r0") == 0
        exchange.client.flow.write_paused = False
        stream.cancel()
        await until(lambda: g.gateway.proxy.awaits("r0") == 0)


async def test_a_paused_engine_stays_out_until_a_token_comes(two: Fleet) -> None:
    canary_times_out = {"health": {"canary_timeout_s": 0.1}}
    async with running(*two.urls, **canary_times_out) as g:
        two.members[0].order(Command("pause"))
        await asyncio.gather(*(g.chat() for _ in range(4)))
        record = g.gateway.fleet.health.records["r0"]
        await until(lambda: record.ejections >= 3)  # canaries were tried and did not come back
        assert g.phase("r0") == "out"
        two.members[0].order(Command("clear"))
        await until(lambda: g.gateway.fleet.available("r0"))


async def test_a_sleeping_engine_gets_nothing_and_is_back_when_it_wakes(two: Fleet) -> None:
    async with running(*two.urls) as g:
        two.members[0].order(Command("sleep"))
        await until(lambda: g.reason("r0") == "asleep")
        assert await served_by(g) == {"r1"}
        two.members[0].order(Command("clear"))
        await until(lambda: g.gateway.fleet.available("r0"))


async def test_a_killed_replica_is_refused_and_its_restart_noticed(two: Fleet) -> None:
    async with running(*two.urls) as g:
        await served_by(g, 2)
        two.members[0].order(Command("kill"))
        await until(lambda: g.reason("r0") == "refused")
        assert await served_by(g) == {"r1"}
        two.members[0].order(Command("restart"))
        await until(lambda: g.gateway.fleet.available("r0"))
        await served_by(g, 8)
        await until(lambda: g.gateway.metrics.counted.restarts[("r0",)] == 1)


async def test_a_scrape_that_fails_brings_the_next_probe_forward(two: Fleet) -> None:
    """Without traffic and with probes an hour apart, a dead replica is still noticed within a scrape."""
    async with running(*two.urls, health={"probe_interval_s": 3600.0}) as g:
        two.members[0].order(Command("kill"))
        await until(lambda: g.reason("r0") == "refused")


async def test_with_no_replica_left_a_known_model_is_503_and_an_unknown_one_404(two: Fleet) -> None:
    async with running(*two.urls) as g:
        assert (await g.chat(model="typo")).status_code == 404
        assert (await g.chat(model="lora")).status_code == 200
        for member in two.members:
            member.order(Command("kill"))
        await until(lambda: not any(g.gateway.fleet.available(r) for r in ("r0", "r1")))
        refused = await g.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await g.chat(model="typo")).status_code == 404
        assert (await g.http.get("/ready")).status_code == 503
        assert (await g.http.get("/health")).status_code == 200


async def test_a_replica_that_was_never_up_leaves_a_model_unknown_as_503() -> None:
    async with running("http://127.0.0.1:9", ready=False) as g:
        await until(lambda: g.reason("r0") == "refused")
        assert (await g.chat()).status_code == 503


async def test_models_are_merged_and_adapters_name_their_base(two: Fleet) -> None:
    async with running(*two.urls) as g:
        rows = (await g.http.get("/v1/models")).json()["data"]
        assert [(row["id"], row["parent"]) for row in rows] == [("sim", None), ("lora", "sim")]


async def test_labels_of_a_removed_replica_leave_the_metrics_page(two: Fleet) -> None:
    async with running(*two.urls) as g:
        await served_by(g)
        assert 'replica="r0"' in (await g.http.get("/metrics")).text
        await g.http.delete("/admin/fleet/r0")
        assert 'replica="r0"' not in (await g.http.get("/metrics")).text
        assert await served_by(g) == {"r1"}
