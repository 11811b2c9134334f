"""Stories of two gateways and a real Redis: what they share, and what happens when it dies, hangs, is empty or full."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import httpx
import pytest

from gateway.config import ConfigError, build
from gateway.shared.scheduler import SharedScheduler
from policies.core import Balancer
from policies.model import Decision, Request
from policies.prefix import told
from tests.gateway.running import Running, until
from tests.gateway.shared.pair import Server, peers, two, up

BIG = {"authorization": "Bearer sk-big"}
# half a minute of it, whatever the model would say; left to itself a simulated one ends after a tenth of a second
ENDLESS: dict[str, Any] = {"model": "sim", "max_tokens": 50_000, "ignore_eos": True, "stream": True}
LONG = "the river runs to the sea and the sea gives it back as rain " * 60


def in_flight_elsewhere(g: Running) -> int:
    replicas = g.gateway.balancer.fleet.replicas.values()
    return sum(r.peers.in_flight for r in replicas if r.peers is not None)


def open_elsewhere(g: Running, tenant: str) -> int:
    assert g.gateway.sharing is not None
    return g.gateway.sharing.registers.tenants_open.get(tenant, 0)


def exchanges(g: Running) -> int:
    assert g.gateway.sharing is not None
    return g.gateway.sharing.store.calls["exchange", "ok"]


async def ask(g: Running, text: str = "where is the sea", key: str = "sk-big", **fields: Any) -> httpx.Response:
    body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 2, **fields}
    return await g.http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})


class Noted:
    """Notes what is submitted to the core it stands before: methods of a compiled one cannot be replaced."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self.seen: list[Request] = []

    def submit(self, request: Request, now: float) -> list[Decision]:
        self.seen.append(request)
        return self._balancer.submit(request, now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._balancer, name)


def listen(g: Running) -> list[Request]:
    """Requests as they reach this gateway's core."""
    noted = Noted(g.gateway.balancer)
    g.gateway.scheduler.balancer = noted  # type: ignore[assignment]
    return noted.seen


@pytest.mark.plain
async def test_where_one_gateway_sent_a_prompt_the_other_knows(server: Server) -> None:
    async with two(server) as (a, b):
        sent, seen = listen(a), listen(b)
        first = await ask(a, LONG)
        await until(lambda: len(server.prefixes()) == len(told(len(sent[0].chain))))
        await ask(b, LONG + "and what then?")
        assert len(sent[0].chain) == 14
        assert seen[0].chain[:14] == sent[0].chain
        assert dict(seen[0].shared_depth) == {first.headers["x-forebay-replica"]: 14}
        assert (await ask(b, "another prompt")).status_code == 200
        assert dict(seen[1].shared_depth) == {}


@pytest.mark.plain
async def test_the_next_turn_finds_the_answer_of_the_one_before_at_another_gateway(server: Server) -> None:
    """Its length is known, in tokens of four bytes until more is learnt, and counts behind the prompt's last chunk."""
    async with two(server) as (a, b):
        sent, seen = listen(a), listen(b)
        usage = (await ask(a, LONG, max_tokens=200)).json()["usage"]
        whole = (sent[0].prompt_bytes + 4 * usage["completion_tokens"]) // 256
        assert whole > len(sent[0].chain) + 1
        await until(lambda: any(b"+" in (server.client.get(key) or b"") for key in server.prefixes()))
        await ask(b, LONG + "and what then? " * 60)
        assert list(seen[0].shared_depth.values()) == [whole]


@pytest.mark.plain
async def test_of_a_prompt_that_is_longer_than_its_chain_all_is_told_with_its_first_token(server: Server) -> None:
    async with two(server) as (a, _):
        sent = listen(a)
        body = ENDLESS | {"messages": [{"role": "user", "content": LONG * 40}]}
        async with a.http.stream("POST", "/v1/chat/completions", json=body, headers=BIG):
            await until(lambda: any(b"+" in (server.client.get(key) or b"") for key in server.prefixes()))
        beyond = sent[0].prompt_bytes // 256 - 512
        assert beyond >= 50
        assert any((server.client.get(key) or b"").endswith(b"+%d" % beyond) for key in server.prefixes())


async def test_load_of_one_is_known_to_the_other_and_gone_with_it(server: Server) -> None:
    async with two(server, expiry_s=0.5) as (a, b):
        body = ENDLESS | {"messages": [{"role": "user", "content": "hi"}]}
        async with a.http.stream("POST", "/v1/chat/completions", json=body, headers=BIG) as answer:
            assert answer.status_code == 200
            await until(lambda: in_flight_elsewhere(b) == 1)
            assert in_flight_elsewhere(a) == 0
        await until(lambda: in_flight_elsewhere(b) == 0)
        async with a.http.stream("POST", "/v1/chat/completions", json=body, headers=BIG):
            await until(lambda: in_flight_elsewhere(b) == 1)
            assert a.gateway.sharing is not None
            await a.gateway.sharing.close()  # as if it died
            await until(lambda: in_flight_elsewhere(b) == 0 and peers(b) == 0)


async def test_a_long_prefill_is_known_to_the_other_before_its_next_turn(server: Server) -> None:
    """Turns are a minute apart here, so nothing but the ring can tell it in time."""
    async with two(server, register_s=300.0, expiry_s=600.0) as (a, b):
        await until(lambda: server.listeners() == 2 and exchanges(a) >= 2 and exchanges(b) >= 2)  # at start, and then
        asked = asyncio.create_task(ask(a, LONG * 40, max_tokens=50_000, ignore_eos=True))
        await until(lambda: in_flight_elsewhere(b) == 1)
        asked.cancel()


async def test_quotas_and_concurrency_hold_over_both(server: Server) -> None:
    async with two(server) as (a, b):
        told = [await ask(g, key="sk-small") for g in (a, b) * 4]
        assert sorted(one.status_code for one in told) == [200] * 4 + [429] * 4
        over = "this key is over its rate of requests: 0.001 requests per second, 4 at once"
        said = {one.json()["error"]["message"] for one in told if one.status_code == 429}
        assert said == {f"{over}; wait as long as Retry-After says"}
        body = ENDLESS | {"messages": [{"role": "user", "content": "hi"}]}
        narrow = {"authorization": "Bearer sk-narrow"}
        async with a.http.stream("POST", "/v1/chat/completions", json=body, headers=narrow):
            await until(lambda: open_elsewhere(b, "narrow") == 1)
            full = await ask(b, key="sk-narrow")
            said = "this key has as many open requests as it may, 1; wait until one ends"
            assert (full.status_code, full.json()["error"]["message"]) == (429, said)
        await until(lambda: open_elsewhere(b, "narrow") == 0)
        assert (await ask(b, key="sk-narrow")).status_code == 200


async def test_what_is_changed_through_one_is_changed_in_both(server: Server) -> None:
    async with two(server) as (a, b):
        patch = {"stream": {"commit_after_s": 11.0}, "listen": {"drain_s": 3.0}}
        assert (await a.http.patch("/admin/config", json=patch)).status_code == 200
        await until(lambda: b.gateway.config.stream.commit_after_s == 11.0)
        assert b.gateway.config.listen.drain_s != 3.0, "what belongs to one gateway stays its own"
        assert (await b.http.post("/admin/drain/r0")).status_code == 200
        await until(lambda: a.gateway.fleet.replicas["r0"].draining)
        assert (await b.http.post("/admin/rollback")).status_code == 200
        await until(lambda: a.gateway.config.stream.commit_after_s == 15.0)
        versions = len(a.gateway.control.versions)
        assert (await a.http.patch("/admin/config", json={"stream": {"commit_after_s": 12.0}})).status_code == 200
        await until(lambda: b.gateway.config.stream.commit_after_s == 12.0)
        assert len(a.gateway.control.versions) == versions + 1, "nobody applies its own change twice"


async def test_a_redis_that_stands_still_holds_nobody_up_and_changes_follow_later(server: Server) -> None:
    async with two(server, lookup_s=0.002, call_s=0.2) as (a, b):
        server.send(signal.SIGSTOP)
        try:
            answers = [await ask(g, LONG) for g in (a, b) * 5]
            assert [one.status_code for one in answers] == [200] * 10
            await until(lambda: not up(a) and not up(b))
            patch = {"stream": {"commit_after_s": 13.0}}
            assert (await a.http.patch("/admin/config", json=patch)).status_code == 200
            assert (await ask(a, key="sk-small")).status_code == 200, "its own bucket decides"
        finally:
            server.send(signal.SIGCONT)
        await until(lambda: up(a) and up(b) and peers(a) == peers(b) == 1)
        await until(lambda: b.gateway.config.stream.commit_after_s == 13.0)


async def test_a_redis_that_dies_is_missed_and_taken_back(server: Server) -> None:
    async with two(server) as (a, b):
        server.stop()
        await until(lambda: not up(a) and not up(b))
        assert [(await ask(g, LONG)).status_code for g in (a, b) * 3] == [200] * 6
        assert "forebay_shared_up 0.0" in (await a.http.get("/metrics")).text
        server.start()
        await until(lambda: up(a) and up(b) and peers(a) == peers(b) == 1)
        await ask(a, LONG)
        await until(lambda: bool(server.prefixes()))
        assert 'forebay_shared_calls_total{call="exchange",outcome="failed"}' in (await a.http.get("/metrics")).text


async def test_an_emptied_redis_is_filled_again(server: Server) -> None:
    async with two(server) as (a, b):
        await ask(a, LONG)
        await until(lambda: len(server.prefixes()) >= 4)
        server.client.flushall()
        scheduler = a.gateway.scheduler
        assert isinstance(scheduler, SharedScheduler)
        await until(lambda: not scheduler.index._written and peers(a) == peers(b) == 1)
        await ask(a, LONG)
        await until(lambda: len(server.prefixes()) >= 4)
        assert (await ask(b, LONG)).status_code == 200


@pytest.mark.plain
async def test_a_full_redis_is_read_and_costs_nobody_a_request(server: Server) -> None:
    async with two(server, expiry_s=0.5) as (a, b):
        await ask(a, LONG)
        await until(lambda: len(server.prefixes()) >= 4)
        server.client.config_set("maxmemory", "1")
        await until(lambda: peers(a) == peers(b) == 0)
        seen = listen(b)
        assert (await ask(b, LONG)).status_code == 200
        assert seen[0].shared_depth, "what is there can still be read"
        assert [(await ask(b, key="sk-small")).status_code for _ in range(5)] == [200] * 4 + [429]
        server.client.config_set("maxmemory", "0")
        await until(lambda: peers(a) == peers(b) == 1)


@pytest.mark.plain
async def test_an_expired_deadline_goes_on_without_an_answer(server: Server) -> None:
    """A lookup that nobody answers in time is dropped, and its late answer is nobody's."""
    async with two(server, lookup_s=0.000001) as (a, _):
        seen = listen(a)
        for _ in range(3):
            assert (await ask(a, LONG)).status_code == 200
        assert all(not request.shared_depth for request in seen)
        await asyncio.sleep(0)
        assert a.gateway.scheduler.open == 0


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as refused:
        build({"redis": {"url": "redis://user:hunter2@127.0.0.1:6379/0"}})
    (line,) = refused.value.lines
    assert "password_env" in line
    assert "hunter2" not in line
