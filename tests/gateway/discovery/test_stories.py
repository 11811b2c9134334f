"""A whole gateway whose replicas come from a file, from DNS and from Kubernetes while clients stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.discovery import sources
from gateway.discovery.watched_file import WatchedFile
from loadtests.faults import Command
from loadtests.replica import Fleet, ReplicaSettings
from tests.gateway.discovery.apiserver import ApiServer, api_server, endpoint, slice_of
from tests.gateway.running import Running, running, until

FAST = ReplicaSettings(time_scale=50.0)


@pytest.fixture
async def sim() -> AsyncIterator[Fleet]:
    async with Fleet.of(FAST, 4) as fleet:
        yield fleet


def kubernetes(api: ApiServer, **more: Any) -> dict[str, Any]:
    keys = {"selector": "app=vllm", "namespace": "inference", "port": "http", "api_url": api.url, "token_file": "/gone"}
    return {"discovery": {"kubernetes": {**keys, "retry_max_s": 0.05, **more}}}


def pod(name: str, url: str, uid: str, **conditions: bool) -> dict[str, Any]:
    return slice_of(
        endpoint(name, "127.0.0.1", uid, **conditions), name=f"slice-{name}", port=int(url.rsplit(":", 1)[1])
    )


async def test_a_file_brings_replicas_in_and_takes_them_out(tmp_path: Path, sim: Fleet) -> None:
    file = tmp_path / "replicas.toml"

    def write(*urls: str) -> None:
        rows = "".join(f'[[replicas]]\nurl = "{url}"\nid = "s{sim.urls.index(url)}"\n' for url in urls)
        file.with_suffix(".new").write_text(rows or "replicas = []\n")
        file.with_suffix(".new").rename(file)

    write(sim.urls[0])
    async with running(discovery={"file": {"path": str(file), "poll_s": 0.02}}) as g:
        await until(lambda: g.gateway.fleet.available("s0"))
        assert (await g.chat()).headers["x-forebay-replica"] == "s0"
        over, seen = asyncio.Event(), list[str]()
        asking = asyncio.create_task(client(g, 1, over, seen))
        write(*sim.urls[1:3])
        await until(lambda: sorted(g.gateway.fleet.replicas) == ["s1", "s2"])
        over.set()
        await asking
        assert set(seen) == {"whole"}  # the swap left no gap
        await until(lambda: g.gateway.fleet.available("s1") and g.gateway.fleet.available("s2"))
        file.write_text("[[replicas]]\n")
        await until(lambda: g.gateway.sources.reports["file"].trouble is not None)
        (row,) = (await g.http.get("/admin/discovery")).json()
        assert (row["source"], row["members"]) == ("file", 2)
        assert row["trouble"].endswith(
            "replicas[0].url: is missing; Base URL, as http://10.0.0.7:8000; may have a path prefix."
        )
        assert 'forebay_discovery_members{source="file"} 2.0' in (await g.http.get("/metrics")).text
        gone = await g.http.delete("/admin/fleet/s1")
        assert gone.json() == {"errors": ['replica "s1": is named by file; take it out there, or drain it here']}
        assert (await g.chat()).status_code == 200


async def test_until_a_source_has_answered_no_model_is_unknown(sim: Fleet) -> None:
    """A typing error and a model whose replicas are not known yet look alike: 503 may be tried again, 404 may not."""
    async with api_server(down=True) as api:
        api.put(pod("vllm-0", sim.urls[1], "u0"))
        async with running(sim.urls[0], **kubernetes(api)) as g:
            assert (await g.chat(model="typo")).status_code == 503
            assert (await g.chat()).status_code == 200
            api.down = False
            await until(lambda: g.gateway.fleet.available("vllm-0"))
            assert (await g.chat(model="typo")).status_code == 404


async def test_a_pod_that_terminates_gets_nothing_new_and_its_stream_ends_whole(sim: Fleet) -> None:
    async with api_server() as api:
        for i in range(2):
            api.put(pod(f"vllm-{i}", sim.urls[i], f"u{i}"))
        async with running(**kubernetes(api), health={"hang_s": 60.0}) as g:
            await until(lambda: all(g.gateway.fleet.available(f"vllm-{i}") for i in range(2)))
            for member in sim.members:
                member.order(Command("hang"))
            answers = [asyncio.create_task(g.chat(stream=True, max_tokens=20)) for _ in range(2)]
            await until(lambda: sum(len(e.record.attempts) for e in g.gateway.proxy.live) == 2)
            api.put(pod("vllm-0", sim.urls[0], "u0", ready=False, terminating=True))
            await until(lambda: not g.gateway.fleet.available("vllm-0"))
            api.delete("slice-vllm-0")
            await until(lambda: "vllm-0" in g.gateway.members.leaving)
            for member in sim.members:
                member.order(Command("clear"))
            texts = [(await answer).text for answer in answers]
            assert all(text.endswith("data: [DONE]\n\n") for text in texts)
            await until(lambda: g.gateway.fleet.get("vllm-0") is None)
            assert (await g.chat()).headers["x-forebay-replica"] == "vllm-1"


async def test_a_pod_that_moves_keeps_its_counters_and_its_connections_follow(sim: Fleet) -> None:
    """Two addresses of one process: here the second is a simulated replica that says another process start."""
    async with api_server() as api:
        api.put(pod("vllm-0", sim.urls[0], "u0"))
        async with running(**kubernetes(api)) as g:
            await until(lambda: g.gateway.fleet.available("vllm-0"))
            await g.chat()
            itself = g.gateway.fleet.replicas["vllm-0"]
            api.put(pod("vllm-0", sim.urls[1], "u0"))
            await until(lambda: itself.url == sim.urls[1])
            assert (await g.chat()).status_code == 200
            await until(lambda: g.gateway.metrics.counted.restarts[("vllm-0",)] == 1)
            assert g.gateway.fleet.replicas["vllm-0"] is itself
            assert g.gateway.metrics.counted.attempts["vllm-0", "success", ""] == 2


async def test_a_conversation_stays_where_its_prefix_is_while_others_come_and_go(sim: Fleet) -> None:
    async with api_server() as api:
        api.put(pod("vllm-0", sim.urls[0], "u0"))
        api.put(pod("vllm-1", sim.urls[1], "u1"))
        async with running(policy={"name": "forebay", "seed": 1}, **kubernetes(api)) as g:
            await until(lambda: all(g.gateway.fleet.available(f"vllm-{i}") for i in range(2)))
            long = [{"role": "user", "content": "".join(f"fact {n} of this conversation. " for n in range(600))}]

            async def turn() -> tuple[str, int]:
                answer = await g.chat(messages=long)
                return answer.headers["x-forebay-replica"], answer.json()["usage"]["prompt_tokens_details"][
                    "cached_tokens"
                ]

            home, cached = await turn()
            assert cached == 0
            assert (await turn())[0] == home
            (other,) = {"vllm-0", "vllm-1"} - {home}
            api.put(pod("vllm-2", sim.urls[2], "u2"))
            api.put(pod("vllm-3", sim.urls[3], "u3"))
            await until(lambda: all(g.gateway.fleet.available(f"vllm-{i}") for i in (2, 3)))
            api.delete(f"slice-{other}")
            await until(lambda: g.gateway.fleet.get(other) is None)
            again, cached = await turn()
            assert again == home
            assert cached > 1000


async def test_sources_follow_the_configuration_and_one_that_fails_by_our_fault_starts_again(
    tmp_path: Path, sim: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "AGAIN_S", 0.01)
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text(f'[[replicas]]\nurl = "{sim.urls[0]}"\nid = "a"\n')
    two.write_text(f'[[replicas]]\nurl = "{sim.urls[0]}"\nid = "a"\n[[replicas]]\nurl = "{sim.urls[1]}"\nid = "b"\n')
    async with running(discovery={"file": {"path": str(one), "poll_s": 0.02}}) as g:
        await until(lambda: g.gateway.fleet.available("a"))
        itself = g.gateway.fleet.replicas["a"]
        await g.http.patch("/admin/config/discovery", json={"file": {"path": str(two)}})
        await until(lambda: g.gateway.fleet.available("b"))
        assert g.gateway.fleet.replicas["a"] is itself
        look = WatchedFile._look

        def fails_once(self: WatchedFile) -> tuple[int, ...]:
            monkeypatch.setattr(WatchedFile, "_look", look)
            raise ZeroDivisionError

        monkeypatch.setattr(WatchedFile, "_look", fails_once)
        await until(lambda: "discovery from file failed; it starts again" in caplog.text)
        two.write_text(f'[[replicas]]\nurl = "{sim.urls[1]}"\nid = "b"\n')
        await until(lambda: list(g.gateway.fleet.replicas) == ["b"])
        await g.http.patch("/admin/config/discovery", json={"file": {"path": None}})
        await until(lambda: not g.gateway.fleet.replicas)
        assert (await g.http.get("/admin/discovery")).json() == []


# -- a minute of churn, as fast as it goes -------------------------------------------------------------------------

CHANGES = 1000


async def client(g: Running, n: int, going: asyncio.Event, seen: list[str]) -> None:
    while not going.is_set():
        answer = await g.chat(
            stream=n % 2 == 0, max_tokens=8, messages=[{"role": "user", "content": f"turn {n} " * 50}]
        )
        seen.append("whole" if answer.status_code == 200 and "error" not in answer.text else answer.text)


def left_over(g: Running) -> dict[str, int]:
    """Everything that is kept by replica or by request, and must not grow with their number."""
    gateway = g.gateway
    return {
        "in flight": sum(r.ledger.in_flight for r in gateway.balancer.fleet.replicas.values()),
        "live": len(gateway.proxy.live),
        "owners": gateway.scheduler.open,
        "pools of others": len(gateway.proxy._pools.keys() - gateway.fleet.replicas.keys()),
        "meters of others": len(gateway.scheduler.meters.keys() - gateway.fleet.replicas.keys()),
        "watches": len(gateway.watch._tasks) - len(gateway.fleet.replicas),
        "health": len(gateway.fleet.health.records) - len(gateway.fleet.replicas),
        "core": len(gateway.balancer.fleet.replicas) - len(gateway.fleet.replicas),
        "members": len(gateway.members._there) - len(gateway.fleet.replicas),
        "leaving": len(gateway.members.leaving),
        "troubles": len({key[0] for key in gateway.watch._troubles} - gateway.fleet.replicas.keys()),
        "probed": len(gateway.watch._probed - gateway.fleet.replicas.keys()),
    }


async def test_a_thousand_membership_changes_lose_nothing_and_leave_nothing(sim: Fleet) -> None:
    rng = random.Random(5)
    async with api_server() as api:
        api.put(pod("steady", sim.urls[0], "steady"))
        calm = {"health": {"probe_interval_s": 1.0}, "scrape": {"interval_s": 1.0}}
        async with running(policy={"name": "forebay", "seed": 1}, **calm, **kubernetes(api)) as g:
            await until(lambda: g.gateway.fleet.available("steady"))
            tasks_before = len(asyncio.all_tasks())
            going, seen = asyncio.Event(), list[str]()
            clients = [asyncio.create_task(client(g, n, going, seen)) for n in range(2)]
            there: dict[str, str] = {}  # pod: URL; each pod is new, as after a rollout
            number = 0
            for _ in range(CHANGES):
                free = [url for url in sim.urls[1:] if url not in there.values()]
                if free and (not there or rng.random() < 0.5):
                    url, number = rng.choice(free), number + 1
                    there[f"vllm-{number}"] = url
                    api.put(pod(f"vllm-{number}", url, f"uid-{number}"))
                else:
                    name = rng.choice(sorted(there))
                    del there[name]
                    api.delete(f"slice-{name}")
                if rng.random() < 0.02:
                    api.drop()
                wanted = {"steady", *there}
                fleet, leaving = g.gateway.fleet, g.gateway.members.leaving
                await until(lambda: fleet.replicas.keys() - leaving.keys() == wanted)  # noqa: B023
            going.set()
            await asyncio.gather(*clients)
            assert set(seen) == {"whole"}
            assert number > 300
            await until(lambda: not any(left_over(g).values()))
            await until(lambda: sorted(g.gateway.fleet.replicas) == sorted(["steady", *there]))
            page = (await g.http.get("/metrics")).text
            named = {part.split('"')[1] for part in page.split("{") if part.startswith('replica="')}
            assert named <= {"steady", *there}
            watches = 3 * (len(there))  # a watch and its two loops for each replica that was not there before
            await until(lambda: len(asyncio.all_tasks()) <= tasks_before + watches + 2)
            assert (await g.chat()).status_code == 200
