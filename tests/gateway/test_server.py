"""The whole process: shutting down loses nothing, signals, tenants at the door, and what is left in the journal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.tenants import digest
from loadtests.faults import Command
from loadtests.replica import Fleet, ReplicaSettings
from tests.gateway.running import running, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def sim() -> AsyncIterator[Fleet]:
    async with Fleet.of(ReplicaSettings(time_scale=20.0)) as fleet:
        yield fleet


# -- the end -------------------------------------------------------------------------------------------------------


async def test_sigterm_turns_ready_off_refuses_newcomers_and_lets_streams_finish(sim: Fleet) -> None:
    async with running(*sim.urls, health={"hang_s": 60.0}) as g:
        sim.members[0].order(Command("hang"))
        stream = asyncio.create_task(g.chat(stream=True, max_tokens=30))
        await until(lambda: len(g.gateway.proxy.live) == 1)
        g.terminate()
        await until(lambda: g.gateway.proxy.draining)
        assert (await g.http.get("/ready")).text == "draining\n"
        assert (await g.http.get("/health")).status_code == 200
        refused = await g.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        sim.members[0].order(Command("clear"))
        assert (await stream).text.endswith("data: [DONE]\n\n")
        await g.task  # and then it ends by itself
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient(trust_env=False).get(g.url)


async def test_a_stream_that_does_not_finish_in_time_is_cut(sim: Fleet) -> None:
    async with running(*sim.urls, listen={"port": 0, "drain_s": 0.2}, health={"hang_s": 60.0}) as g:
        sim.members[0].order(Command("hang"))
        stream = asyncio.create_task(g.chat(stream=True))
        await until(lambda: len(g.gateway.proxy.live) == 1)
        g.terminate()
        answer = await stream
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        await g.task
        assert g.gateway.proxy.live == set()
        assert g.reason("r0") == ""  # it is not the replica's fault


async def test_a_stream_that_has_begun_is_cut_with_an_error_event(sim: Fleet) -> None:
    async with running(*sim.urls, listen={"port": 0, "drain_s": 0.2}, health={"hang_s": 60.0}) as g:
        stream = asyncio.create_task(g.chat(stream=True, max_tokens=20_000, ignore_eos=True))
        await until(lambda: any(e.record.first_content_at for e in g.gateway.proxy.live))
        sim.members[0].order(Command("hang"))
        g.terminate()
        text = (await stream).text
        assert '"code":"draining"' in text.split("\n\n")[-2]
        assert "[DONE]" not in text
        await g.task


async def test_a_second_signal_ends_it_at_once(sim: Fleet) -> None:
    async with running(*sim.urls, health={"hang_s": 60.0}) as g:
        sim.members[0].order(Command("hang"))
        stream = asyncio.create_task(g.chat(stream=True))
        await until(lambda: len(g.gateway.proxy.live) == 1)
        g.terminate()
        g.terminate()
        await g.task
        assert (await stream).status_code == 503


# -- signals -------------------------------------------------------------------------------------------------------


async def test_sighup_reads_the_file_again_and_a_mistake_leaves_what_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text("[limits]\nmax_body_bytes = 1000\n")
    async with running(file=file) as g:
        file.write_text("[limits]\nmax_body_bytes = 2000\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: g.gateway.proxy.config.limits.max_body_bytes == 2000)
        file.write_text("[limits]\nmax_body_bytes = -1\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: "reload refused" in caplog.text)
        assert "reload refused: limits.max_body_bytes = -1: must be above 0" in caplog.text
        assert g.gateway.proxy.config.limits.max_body_bytes == 2000


async def test_signals_that_only_a_gateway_of_several_workers_knows_end_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as g:
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
        await until(lambda: "SIGUSR1" in caplog.text and "SIGUSR2" in caplog.text)
        assert (await g.http.get("/health")).status_code == 200
    assert "SIGUSR2: nothing is done; it replaces the program only where it runs with --workers" in caplog.text


# -- tenants -------------------------------------------------------------------------------------------------------

KEY = "sk-alice-5f1d"
TENANTS = {
    "alice": {
        "keys_sha256": [digest(KEY).hex()],
        "classes": ["interactive", "standard"],
        "requests_per_s": 0.01,
        "request_burst": 2,
    }
}
BODY = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


async def test_keys_classes_and_limits_at_the_door() -> None:
    settings = ReplicaSettings(time_scale=20.0, api_key="vllm-key")
    async with Fleet.of(settings) as sim:
        rows = [{"url": sim.urls[0], "id": "r0", "key_env": "VLLM_KEY"}]
        async with running(replicas=rows, tenants=TENANTS, environ={"VLLM_KEY": "vllm-key"}) as g:

            async def ask(**headers: str) -> httpx.Response:
                return await g.http.post("/v1/chat/completions", json=BODY, headers=headers)

            mine = {"authorization": f"Bearer {KEY}"}
            assert (await ask()).json()["error"]["code"] == "no_key"
            assert (await ask(authorization="Bearer sk-other")).status_code == 401
            forbidden = await ask(**mine, **{"x-service-class": "batch"})
            assert (forbidden.status_code, forbidden.json()["error"]["code"]) == (403, "class_not_allowed")
            assert (await ask(**mine)).status_code == 200  # with the replica's own key, which alice has not
            assert (await ask(**mine)).status_code == 200
            refused = await ask(**mine)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "over_quota")
            assert 95 <= int(refused.headers["retry-after"]) <= 126  # a hundred seconds, and up to a quarter more
            assert (await g.http.get("/v1/models")).status_code == 401
            assert (await g.http.get("/v1/models", headers=mine)).status_code == 200


async def test_a_replica_that_wants_a_key_it_was_not_given_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Fleet.of(ReplicaSettings(api_key="vllm-key")) as sim, running(*sim.urls, ready=False):
        await until(lambda: "/v1/models answered 401" in caplog.text)
        assert "set key_env of this replica to a variable with its API key" in caplog.text


# -- records -------------------------------------------------------------------------------------------------------


async def test_each_request_leaves_one_line_in_the_journal(tmp_path: Path, sim: Fleet) -> None:
    path = tmp_path / "journal.jsonl"
    async with running(*sim.urls, journal={"path": str(path)}) as g:
        await g.chat(stream=True)
        await g.chat()
        await g.chat(model="typo")
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["status"], x["outcome"], x["streams"]) for x in lines[:2]] == [
        (200, "success", True),
        (200, "success", False),
    ]
    assert (lines[2]["status"], lines[2]["outcome"], lines[2]["reason"]) == (404, "client_error", "unknown_model")
    first = lines[0]
    assert first["completion_tokens"] == [4, "usage"]
    assert first["policy"] == "round_robin"
    assert [a["replica_id"] for a in first["attempts"]] == ["r0"]
    assert 0 < first["ttft_s"] <= first["e2e_s"]
    assert "river" not in path.read_text()


async def test_metrics_tell_what_clients_saw(sim: Fleet) -> None:
    async with running(*sim.urls) as g:
        await g.chat(stream=True)
        await g.chat(model="typo")
        page = (await g.http.get("/metrics")).text
    assert 'forebay_requests_total{outcome="success",reason="",service_class="standard"} 1.0' in page
    assert 'outcome="client_error",reason="unknown_model"' in page
    assert 'forebay_ttft_seconds_count{service_class="standard"} 1.0' in page
    assert "process_resident_memory_bytes" in page


async def test_paths_that_are_nobody_s_are_404_and_development_routes_are_never_proxied(sim: Fleet) -> None:
    async with running(*sim.urls) as g:
        for path in ("/", "/v1/load_lora_adapter", "/sleep", "/server_info", "/healthz"):
            assert (await g.http.post(path)).status_code == 404


async def test_held_requests_are_told_to_go_elsewhere_at_once(sim: Fleet) -> None:
    gentle = {
        "policy": {"name": "forebay", "seed": 1},
        "admission": {"backlog_s": 0.001},
        "health": {"hang_s": 60.0},
    }
    async with running(*sim.urls, **gentle) as g:
        sim.members[0].order(Command("hang"))
        long = [{"role": "user", "content": "river " * 2000}]
        asks = [asyncio.create_task(g.chat(messages=long, stream=True)) for _ in range(6)]
        await until(lambda: g.gateway.open_requests == 6 and len(g.gateway.proxy.held()) >= 3)
        rows = (await g.http.get("/admin/held")).json()
        assert {row["service_class"] for row in rows} == {"standard"}
        assert "forebay_held_requests" in (await g.http.get("/metrics")).text
        # streams that have not begun hold their place: at most two are sent however long this takes
        g.terminate()
        await until(lambda: not g.gateway.proxy.held() and any(ask.done() for ask in asks))
        refused = [ask.result() for ask in asks if ask.done()]
        assert {(r.status_code, r.json()["error"]["code"]) for r in refused} == {(503, "draining")}
        sim.members[0].order(Command("clear"))
        statuses = [(await ask).status_code for ask in asks]
        assert set(statuses) == {200, 503}
        assert statuses.count(503) >= 4


async def test_no_more_than_the_configured_number_is_held(sim: Fleet) -> None:
    bounded = {
        "policy": {"name": "forebay", "seed": 1},
        "limits": {"held_requests": 2},
        "health": {"hang_s": 60.0},
    }
    async with running(*sim.urls, admission={"backlog_s": 0.001}, **bounded) as g:
        sim.members[0].order(Command("hang"))
        long = [{"role": "user", "content": "river " * 2000}]
        asks = [asyncio.create_task(g.chat(messages=long)) for _ in range(8)]
        await until(lambda: any(ask.done() for ask in asks))
        refused = next(ask.result() for ask in asks if ask.done())
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert len(g.gateway.proxy.held()) <= 2
        sim.members[0].order(Command("clear"))
        assert {(await ask).status_code for ask in asks} == {200, 429}


async def test_the_command_serves_and_ends_with_status_0(tmp_path: Path, sim: Fleet) -> None:
    journal = tmp_path / "journal.jsonl"
    file = tmp_path / "gateway.toml"
    file.write_text(f'[listen]\nport = 0\n[journal]\npath = "{journal}"\n[limits]\nloop_lag_s = "none"\n')
    options = ["--config", str(file), "--replica", sim.urls[0], "--policy", "round_robin"]
    arguments = ["-m", "loadtests.cli", "serve", *options]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=ROOT, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    said = (await process.stdout.readuntil(b'"stream":true}\'')).decode()
    address = said.split("Forebay listens on ")[1].split()[0]
    assert f"{sim.urls[0]}  " in said
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http:
        assert (await http.post(f"{address}/v1/chat/completions", json={**BODY, "model": "sim"})).status_code == 200
    process.terminate()
    await process.communicate()
    assert process.returncode == 0
    assert len(journal.read_text().splitlines()) == 1
