"""Hundreds of requests, clients that leave at any moment, replicas that fail in every way: at the end nothing is left.

Chance decides what happens and a seed decides chance; what may not depend on it is checked: each request ends once,
every counter of the gateway, of its core and of the replicas returns to zero, and nothing is logged as our fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest

from gateway.record import RequestRecord
from gateway.tenants import digest
from loadtests.faults import Command
from loadtests.replica import Fleet, ReplicaSettings
from tests.gateway.running import Running, running, until

REQUESTS, CLIENTS = 400, 32
PATHS = ("chat/completions", "completions", "responses", "messages")
FAULTS = ("crash", "kill", "hang", "abort", "drain", "slow", "error", "cut", "refuse", "restart", "unhealthy", "pause")
WORDS = ("river", "bank", "water", "flows", "under", "bridge")
LEAVES = ("never", "in head", "in body", "at once", "before answer", "in answer", "half close")
KEYS = {"one": "sk-one", "two": "sk-two"}
TENANTS = {name: {"keys_sha256": [digest(key).hex()], "weight": 1.0 + i} for i, (name, key) in enumerate(KEYS.items())}


def body(path: str, rng: random.Random) -> bytes:
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 400)))
    document: dict[str, Any] = {"model": "sim", "stream": rng.random() < 0.7, "max_tokens": rng.randint(1, 60)}
    if path == "completions":
        document |= {"prompt": words, "n": rng.choice((1, 1, 2))}
    elif path == "responses":
        document |= {"input": words, "max_output_tokens": document.pop("max_tokens")}
    else:
        document["messages"] = [{"role": "user", "content": words}]
    return orjson.dumps(document)


async def one(g: Running, rng: random.Random) -> str:
    """One request of a client that may leave; answers how far it came."""
    where = urlsplit(g.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    path, leaves = rng.choice(PATHS), rng.choice(LEAVES)
    payload = body(path, rng)
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Authorization: Bearer {rng.choice(list(KEYS.values()))}\r\nContent-Length: {len(payload)}\r\n"
        f"x-service-class: {rng.choice(('interactive', 'standard', 'batch'))}\r\n"
    )
    if rng.random() < 0.2:
        head += f"x-deadline-ms: {rng.choice((30, 300, 3000))}\r\n"
    message = head.encode() + b"\r\n" + payload
    cut = {"in head": len(head) // 2, "in body": len(message) - len(payload) // 2}.get(leaves, len(message))
    try:
        writer.write(message[:cut])
        await writer.drain()
        if leaves in ("in head", "in body", "at once"):
            await asyncio.sleep(rng.random() * 0.02)
        elif leaves == "half close":
            writer.write_eof()
            await reader.read()
        elif leaves == "never":
            await reader.read()
        elif leaves == "before answer":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), rng.random() * 0.1)
        else:
            await reader.read(rng.randint(1, 2000))
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return leaves


async def opening(g: Running, fleet: Fleet, records: list[RequestRecord]) -> None:
    """Two replicas of three cut one answer each, and patient clients come until a request has been tried twice.

    No probe and no scrape can find out first: chance owes nobody a second try, so it is not left to it."""
    for member in fleet.members[:2]:
        member.order(Command("cut", after=0, count=1))
    for nth in range(20):
        answer = await g.http.post(
            "/v1/completions",
            json={"model": "sim", "prompt": f"{nth} of {WORDS}", "max_tokens": 2},
            headers={"authorization": f"Bearer {KEYS['one']}"},
        )
        assert answer.status_code == 200
        if len(records[-1].attempts) > 1:
            break
    assert len(records[-1].attempts) > 1
    for member in fleet.members[:2]:
        member.order(Command("clear"))


async def faults(fleet: Fleet, rng: random.Random) -> None:
    """One member at a time is ill, for a moment."""
    while True:
        member = rng.choice(fleet.members)
        member.order(Command(rng.choice(FAULTS), after=rng.randint(0, 20), count=rng.randint(1, 5)))
        await asyncio.sleep(rng.random() * 0.2)
        member.order(Command("clear"))
        await asyncio.sleep(rng.random() * 0.1)


def left(g: Running) -> Iterator[tuple[str, object]]:
    """Everything that must be zero or empty once nobody is there any more."""
    gateway, core = g.gateway, g.gateway.balancer
    yield "live exchanges", len(gateway.proxy.live)
    yield "owners", gateway.scheduler.open
    yield "held by the shell", gateway.scheduler.held
    yield "bodies at the door", gateway.proxy.door.receiving_bytes
    yield "open in the core", len(core._open)
    yield "held in the core", (core.binding.queue.count, core.binding.queue.bytes)
    yield "claims of prefixes", len(core.dispatcher.affinity._claimed)
    for replica in core.fleet.replicas.values():
        ledger = replica.ledger
        yield f"{replica.id} ledger", (ledger.in_flight, ledger.live_decodes, ledger.queued, ledger.kv_tokens)
        yield f"{replica.id} parked", (round(replica.parked_s, 9), len(replica.fill), len(replica.pace._objectives))
        meter = gateway.scheduler.meters.get(replica.id)
        yield f"{replica.id} live streams", 0 if meter is None else len(meter.live)
        pool = gateway.proxy.pool(replica.id)
        yield f"{replica.id} connections in use", 0 if pool is None else pool.stats.open - pool.stats.idle
    for tenant in gateway.proxy.tenants.by_name.values():
        yield f"open of tenant {tenant.name}", tenant.open


def empty(value: object) -> bool:
    return all(x == 0 for x in value) if isinstance(value, tuple) else value == 0


@pytest.mark.parametrize("policy", ["forebay", "round_robin"])
async def test_whatever_happens_nothing_is_left(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(20)
    server_log = logging.getLogger("uvicorn.error")
    caplog.set_level(logging.INFO)
    records: list[RequestRecord] = []
    settings = {
        "policy": {"name": policy, "seed": 1},
        "tenants": TENANTS,
        "timeouts": {"first_event_s": 1.0, "idle_s": 1.0},
        "stream": {"commit_after_s": 0.3},
        "retry": {"budget_share": 1.0, "budget_per_s": 100.0},
    }
    async with Fleet.of(ReplicaSettings(time_scale=10.0), 3) as fleet, running(*fleet.urls, **settings) as g:
        server_log.addHandler(caplog.handler)
        keep = g.gateway.proxy.sink
        g.gateway.proxy.sink = lambda record: (records.append(record), keep(record))[1]
        await opening(g, fleet, records)
        ill = asyncio.create_task(faults(fleet, rng))
        todo = iter(range(REQUESTS))

        async def client() -> None:
            for _ in todo:
                await one(g, rng)

        async with asyncio.timeout(120):
            await asyncio.gather(*[client() for _ in range(CLIENTS)])
        ill.cancel()
        for member in fleet.members:
            member.order(Command("clear"))
        with contextlib.suppress(TimeoutError):
            await until(lambda: all(empty(value) for _, value in left(g)))
        assert {name: value for name, value in left(g) if not empty(value)} == {}
        await until(lambda: all(not m.replica.engine.running and not m.replica.engine._waiting for m in fleet.members))
        await until(lambda: not g.server.server_state.tasks)
        server_log.removeHandler(caplog.handler)
    assert len({id(r) for r in records}) == len(records)
    assert all(r.outcome is not None and r.partition is not None and r.ended_at is not None for r in records)
    outcomes = {str(r.outcome) for r in records}
    assert {"success", "cancelled"} <= outcomes
    ours = ("ASGI", "failed inside the gateway", "nobody owns", "was lost")
    assert [line for line in caplog.text.splitlines() if any(word in line for word in ours)] == []
