"""The stream of the live page: who may read it, what is in it, and that nobody is computed for who does not look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from gateway.live import Live
from loadtests.faults import Command
from loadtests.replica import Fleet, ReplicaSettings
from tests.gateway.running import Running, running, until


@pytest.fixture
async def sim() -> AsyncIterator[Fleet]:
    async with Fleet.of(ReplicaSettings(time_scale=20.0), 2) as fleet:
        yield fleet


async def events(answer: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    kind = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: "):
            yield kind, orjson.loads(line[6:])


async def seen(g: Running, wanted: Any) -> dict[str, Any]:
    """The first snapshot for which `wanted` is true."""
    async with asyncio.timeout(60), g.http.stream("GET", "/admin/live") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for kind, data in events(answer):
            if kind == "snapshot" and wanted(data):
                found: dict[str, Any] = data
                return found
    raise AssertionError("the stream ended")


async def test_a_snapshot_tells_of_fleet_classes_and_what_went_wrong(sim: Fleet) -> None:
    calm = {"standard": {"ttft_s": "none", "tpot_s": "none"}}
    async with running(*sim.urls, policy={"name": "forebay", "seed": 1}, classes=calm) as g:
        for _ in range(4):
            assert (await g.chat()).status_code == 200
        refused = await g.http.post(
            "/v1/chat/completions",
            json={"model": "sim", "messages": [{"role": "user", "content": "x" * 4000}]},
            headers={"x-slo-ttft-ms": "1"},
        )
        assert refused.status_code == 429
        now = await seen(g, lambda data: data["notable"])
    assert [r["id"] for r in now["replicas"]] == ["r0", "r1"]
    assert [r["phase"] for r in now["replicas"]] == ["in", "in"]
    (standard,) = [c for c in now["classes"] if c["name"] == "standard"]
    assert (standard["offered_rps"], standard["good_rps"]) == (
        pytest.approx(5 / 60, abs=1e-3),
        pytest.approx(4 / 60, abs=1e-3),
    )
    assert standard["attainment"] == 0.8
    assert now["total"]["attainment"] == 0.8
    (shed,) = now["notable"]
    assert (shed["partition"], shed["reason"], shed["status"]) == ("rejected", "infeasible", 429)
    assert {other["replica_id"] for other in shed["alternatives"]} == {"r0", "r1"}
    assert all(other["predicted_ttft_s"] > 0.001 for other in shed["alternatives"])
    assert now["experiment"]["state"] == "none"
    assert now["prefixes"]["known"] == 0


async def test_a_dead_replica_is_told_at_once(sim: Fleet) -> None:
    async with running(*sim.urls) as g, asyncio.timeout(60), g.http.stream("GET", "/admin/live") as answer:
        killed = False
        async for kind, data in events(answer):
            if kind != "snapshot":
                continue
            if not killed:
                sim.members[1].order(Command("kill"))
                killed = True
            if data["replicas"][1]["phase"] == "out":
                assert data["replicas"][1]["reason"] == "refused"
                return
    raise AssertionError("the stream ended")


async def test_nothing_is_computed_while_nobody_looks(sim: Fleet) -> None:
    async with running(*sim.urls) as g:
        live = g.gateway.live
        assert (await g.chat()).status_code == 200
        assert (live.computed, live.viewers) == (0, 0)
        await seen(g, lambda data: True)
        await until(lambda: live.viewers == 0)
        assert live._task is None
        before = live.computed
        assert (await g.chat()).status_code == 200
        assert live.computed == before


async def test_one_snapshot_serves_all_who_look() -> None:
    live = Live(
        lambda now: {"unix": now, "total": {}, "open": 0, "held": 0, "loop_lag_s": 0, "replicas": [], "classes": []}
    )
    first, second = live.stream(), live.stream()
    assert (await anext(first)).startswith(b"retry: 1000\n\nevent: history\ndata: []\n\n")
    one = await anext(first)
    assert live.computed == 1
    assert b'"unix"' in await anext(second)  # history with that point
    assert await anext(second) == one
    assert live.computed == 1
    live.changed()
    one, other = await asyncio.gather(anext(first), anext(second))
    assert one == other
    assert live.computed == 2
    await first.aclose()
    await second.aclose()
    assert (live.viewers, live._task) == (0, None)


async def test_the_stream_ends_when_the_gateway_does(sim: Fleet) -> None:
    async with running(*sim.urls) as g, g.http.stream("GET", "/admin/live") as answer:
        told = events(answer)
        assert (await anext(told))[0] == "history"
        g.terminate()
        async with asyncio.timeout(60):
            async for _ in told:
                pass


async def test_the_stream_needs_the_token_and_the_page_does_not(sim: Fleet) -> None:
    async with running(*sim.urls, environ={"FOREBAY_ADMIN_TOKEN": "s3cret"}) as g:
        assert (await g.http.get("/admin/live")).status_code == 401
        page = await g.http.get("/dashboard")
        assert page.status_code == 200
        assert page.headers["content-security-policy"].startswith("default-src 'self'; frame-ancestors 'none'")
        headers = {"authorization": "Bearer s3cret"}
        async with g.http.stream("GET", "/admin/live", headers=headers) as answer:
            assert answer.status_code == 200


async def test_too_many_viewers_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.live.MOST_VIEWERS", 0)
    async with running() as g:
        answer = await g.http.get("/admin/live")
    assert (answer.status_code, answer.json()) == (503, {"errors": ["0 viewers are served already"]})
