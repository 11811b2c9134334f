"""What goes wrong with a simulated replica goes wrong as with real ones (recorded), and only on command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from loadtests.faults import Command
from loadtests.replica import EngineConfig, Fleet, ReplicaSettings
from tests.loadtests.on_wire import CAPTURES, QUICK, SETTINGS, raw, start_stream, until


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet.of(SETTINGS, 2) as running:
        yield running


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fleet.urls[0], timeout=10) as http:
        yield http


async def fault(client: httpx.AsyncClient, kind: str, **more: object) -> None:
    answer = await client.post("/forebay/fault", json={"kind": kind, **more})
    assert answer.status_code == 200, answer.text


async def refused(url: str) -> bool:
    try:
        async with httpx.AsyncClient() as http:
            await http.get(url + "/health")
    except httpx.ConnectError:
        return True
    return False


async def test_a_crash_is_an_error_event_then_a_refusing_port(fleet: Fleet, client: httpx.AsyncClient) -> None:
    reader, _ = await start_stream(fleet.urls[0])
    await fault(client, "crash")
    rest = await reader.readuntil(b"0\r\n\r\n")
    recorded_death = (CAPTURES / "engine-death.txt").read_text()
    error = rest[rest.index(b'data: {"error"') :].split(b"\n\n")[0].decode()
    assert error in recorded_death
    assert rest.endswith(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    assert await refused(fleet.urls[0])


async def test_a_kill_is_a_plain_end_of_stream(fleet: Fleet, client: httpx.AsyncClient) -> None:
    reader, _ = await start_stream(fleet.urls[0])
    fleet.members[0].order(Command("kill"))
    rest = await reader.read()
    assert b"[DONE]" not in rest
    assert not rest.endswith(b"0\r\n\r\n")
    assert await refused(fleet.urls[0])


async def test_a_hang_keeps_health_and_freezes_the_gauges(fleet: Fleet, client: httpx.AsyncClient) -> None:
    replica = fleet.members[0].replica
    _, writer = await start_stream(fleet.urls[0])
    await fault(client, "hang")
    steps = replica.engine.counters.steps
    assert (await client.get("/health")).status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        await client.post(
            "/v1/completions", json={"prompt": "b", "max_tokens": 1}, timeout=httpx.Timeout(10, read=0.05)
        )
    assert replica.engine.counters.steps == steps
    await fault(client, "clear")
    answer = await client.post("/v1/completions", json={"prompt": "c", "max_tokens": 1})
    assert answer.json()["usage"]["completion_tokens"] == 1
    writer.close()


async def test_a_draining_replica_answers_at_once_with_nothing(fleet: Fleet, client: httpx.AsyncClient) -> None:
    reader, _ = await start_stream(fleet.urls[0], tokens=300)
    await fault(client, "drain")
    answer = (await client.post("/v1/completions", json={"prompt": "b", "max_tokens": 9})).json()
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["usage"]["completion_tokens"] == 0
    assert (await client.get("/health")).status_code == 200
    assert b'"finish_reason":"length"' in await reader.readuntil(b"0\r\n\r\n")


async def test_a_stop_without_drain_ends_streams_cleanly_with_abort(fleet: Fleet, client: httpx.AsyncClient) -> None:
    reader, _ = await start_stream(fleet.urls[0])
    fleet.members[0].order(Command("abort"))
    rest = await reader.readuntil(b"0\r\n\r\n")
    assert b'"finish_reason":"abort"' in rest
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert await refused(fleet.urls[0])


@pytest.mark.parametrize(("kind", "ends"), [("error", b"data: [DONE]\n\n\r\n0\r\n\r\n"), ("cut", b"}]}\n\n\r\n")])
async def test_a_stream_breaks_after_so_many_tokens(
    fleet: Fleet, client: httpx.AsyncClient, kind: str, ends: bytes
) -> None:
    await fault(client, kind, after=3, count=1)
    body = {"prompt": "a", "max_tokens": 9, "stream": True}
    broken = await raw(fleet.urls[0], "/v1/completions", body)
    assert broken.count(b'"text"') == 3
    assert broken.endswith(ends)
    assert (await raw(fleet.urls[0], "/v1/completions", body)).count(b'"text"') == 9


async def test_a_port_that_refuses_is_opened_through_another_replica(fleet: Fleet, client: httpx.AsyncClient) -> None:
    await fault(client, "refuse")
    assert await refused(fleet.urls[0])
    async with httpx.AsyncClient(base_url=fleet.urls[1]) as other:
        answer = await other.post("/forebay/fault?replica=0", json={"kind": "clear"})
        assert answer.json() == {"replica": fleet.urls[0], "fault": "clear"}
    await until(lambda: fleet.members[0].listening)
    assert (await client.get("/health")).status_code == 200


async def test_a_fault_can_end_by_itself(
    fleet: Fleet, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = fleet.members[0]
    order, done = member.order, list[tuple[str, bool]]()

    def noted(command: Command) -> None:
        order(command)
        done.append((command.kind, member.listening))

    monkeypatch.setattr(member, "order", noted)
    await fault(client, "refuse", for_s=0.05)
    await until(lambda: len(done) == 2)
    assert (done[0], done[1][0]) == (("refuse", False), "clear")
    await until(lambda: member.listening)


async def test_sleep_shows_in_the_metrics_and_nowhere_else(client: httpx.AsyncClient) -> None:
    assert (await client.post("/sleep?level=1")).json() == {"status": "sleeping", "level": 1}
    assert (await client.get("/health")).status_code == 200
    assert 'sleep_state="awake"} 0.0' in (await client.get("/metrics")).text
    assert (await client.post("/wake_up")).json() == {"status": "awake", "tags": None}
    assert 'sleep_state="awake"} 1.0' in (await client.get("/metrics")).text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"kind": "flood"}, "kind 'flood' must be one of crash, kill, hang"),
        ({"kind": "slow", "factor": "two"}, "factor is 'two'; it must be a number of 0 or more"),
        ({"kind": "slow", "speed": 2}, "speed is unknown; fields are kind, factor, after, count, for_s"),
    ],
)
async def test_a_wrong_fault_is_refused_by_field(client: httpx.AsyncClient, body: dict[str, Any], message: str) -> None:
    answer = await client.post("/forebay/fault", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_queue_limits_answer_503_as_recorded() -> None:
    config = EngineConfig(QUICK, max_model_len=8192, max_num_queued_reqs=1)
    async with Fleet.of(ReplicaSettings(config), 1) as one:
        _, writer = await start_stream(one.urls[0])
        answer = await raw(one.urls[0], "/v1/completions", {"prompt": "b", "max_tokens": 1})
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert answer.split(b"\r\n\r\n")[1].decode() in (CAPTURES / "overload-503.txt").read_text()
        writer.close()


async def test_a_prefix_cache_is_reset_only_when_nothing_is_held(fleet: Fleet, client: httpx.AsyncClient) -> None:
    _, writer = await start_stream(fleet.urls[0])
    assert (await client.post("/reset_prefix_cache")).json() == {"success": False}
    writer.close()
    await until(lambda: not fleet.members[0].replica.engine.running)
    assert (await client.post("/reset_prefix_cache")).json() == {"success": True}


async def test_the_lag_is_reported_and_judged(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
    report = (await client.get("/forebay/sim")).json()
    assert report["lag_s"]["n"] == 5
    assert report["lag_ok"] == (report["lag_s"]["p99"] <= 0.010)
    assert report["profile"] == "quick"
    assert "forebay_sim_lag_seconds_count" in (await client.get("/metrics")).text
