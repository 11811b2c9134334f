"""A deadline that passes after dispatch: the replica is freed, the client is told in its API's own form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import orjson
import pytest

from gateway import waits
from gateway.connecting import connect
from gateway.upstream import Pool
from loadtests.replica import Fleet, ReplicaSettings
from tests.gateway.running import running
from tests.gateway.running import until as until_true
from tests.gateway.scripted import Connection, Gateway, Seen, gateway, replica
from tests.gateway.test_failures import STREAM_HEAD, chunk, event

DEADLINE = "x-deadline-ms: 3600000\r\n"
MESSAGES = b'"messages":[{"role":"user","content":"where is the river"}]'
FIRST_DELTA = b'data: {"type":"response.output_text.delta","delta":"first","sequence_number":4}\n\n'
FIRST_BLOCK = b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"first"}}\n\n'
STREAMS = {  # path: request, first content event
    "/v1/chat/completions": (b'{"model":"tiny","stream":true,%b}' % MESSAGES, event("first")),
    "/v1/completions": (b'{"model":"tiny","stream":true,"prompt":"x"}', event("first", kind="completions")),
    "/v1/responses": (
        b'{"model":"tiny","stream":true,"input":"x"}',
        chunk(b"event: response.output_text.delta\n" + FIRST_DELTA),
    ),
    "/v1/messages": (
        b'{"model":"tiny","stream":true,"max_tokens":9,%b}' % MESSAGES,
        chunk(b"event: content_block_delta\n" + FIRST_BLOCK),
    ),
}
KINDS = pytest.mark.parametrize("spliced", [True, False], ids=["spliced", "asgi"])


class Stuck:
    """A replica that says this much and then nothing, and knows when its connection was closed."""

    def __init__(self, *first: bytes) -> None:
        self.first = first
        self.got, self.left = asyncio.Event(), asyncio.Event()

    async def __call__(self, connection: Connection, request: Seen) -> None:
        await connection.send(*self.first)
        self.got.set()
        await connection.peer_left()
        self.left.set()


def pass_deadlines(g: Gateway) -> None:
    """As the core's timer does at the deadline, without waiting for it."""
    g.scheduler._apply(g.scheduler.balancer.wake(time.monotonic() + 7200.0))


async def freed(g: Gateway, stuck: Stuck) -> None:
    async with asyncio.timeout(60):
        await stuck.left.wait()
    assert (g.in_flight, g.scheduler.open, len(g.proxy.live)) == (0, 0, 0)


@KINDS
@pytest.mark.parametrize("path", STREAMS)
async def test_in_mid_stream_it_ends_with_the_error_event_of_its_api(path: str, spliced: bool) -> None:
    body, first = STREAMS[path]
    stuck = Stuck(STREAM_HEAD, first)
    async with replica(stuck) as a, gateway(a, spliced=spliced) as g:
        client = await g.connect()
        await client.post(path, body, DEADLINE)
        await client.reader.readuntil(b"first")
        pass_deadlines(g)
        rest = await client.reader.readuntil(b"0\r\n\r\n")
        told = orjson.loads(rest[rest.rindex(b"data: ") + 6 : rest.rindex(b"\n\n")])
        if path == "/v1/responses":
            assert (told["type"], told["code"], told["sequence_number"]) == ("error", "expired", 2)
            assert b"event: error\n" in rest
        elif path == "/v1/messages":
            assert (told["type"], told["error"]["type"], told["error"]["code"]) == ("error", "timeout_error", "expired")
            assert b"event: error\n" in rest
        else:
            assert (told["error"]["type"], told["error"]["code"]) == ("timeout_error", "expired")
        assert b"[DONE]" not in rest
        assert b"message_stop" not in rest
        record = await g.record()
        assert (record.outcome, record.partition, record.reason, record.status) == (
            *("expired", "slow_e2e", "expired"),
            200,
        )
        await freed(g, stuck)
        assert g.fleet.health.records["r0"].failed_in_row == 0  # late is not ill
        client.close()


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_before_commit_it_is_504(path: str, streamed: bool) -> None:
    body = STREAMS[path][0] if streamed else STREAMS[path][0].replace(b'"stream":true', b'"stream":false')
    stuck = Stuck(STREAM_HEAD if streamed else b"")
    async with replica(stuck) as a, gateway(a) as g:
        client = await g.connect()
        await client.post(path, body, DEADLINE)
        await stuck.got.wait()
        pass_deadlines(g)
        answer = await client.answer()
        assert answer.status == 504
        assert orjson.loads(answer.body)["error"]["code"] == "expired"
        assert answer.header("x-should-retry") == "false"
        assert ((await g.record()).outcome, (await g.record()).partition) == ("expired", "slow_e2e")
        await freed(g, stuck)
        client.close()


@KINDS
async def test_a_long_whole_answer_is_cut_so_that_it_shows(spliced: bool) -> None:
    """Bytes of it have left already, so there is no status and no event to tell it with."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
    stuck = Stuck(head, b'{"choices":[{"text":"' + b"x" * 400_000)
    async with replica(stuck) as a, gateway(a, spliced=spliced) as g:
        client = await g.connect()
        await client.post("/v1/completions", b'{"model":"tiny","prompt":"x"}', DEADLINE)
        assert b"content-length: 1000000" in await client.head()
        pass_deadlines(g)
        assert len(await client.closed()) < 1_000_000
        record = await g.record()
        assert (record.outcome, record.reason) == ("expired", "expired")
        await freed(g, stuck)


async def test_while_connecting_it_is_504(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck()
    async with replica(stuck) as a, gateway(a) as g:
        pool = g.proxy.pool("r0")
        assert pool is not None
        connecting, go_on = asyncio.Event(), asyncio.Event()

        async def slow(pool: Pool) -> object:
            connecting.set()
            await go_on.wait()
            return await connect(pool)

        monkeypatch.setattr(waits, "connect", slow)
        client = await g.connect()
        await client.post("/v1/completions", b'{"model":"tiny","prompt":"x"}', DEADLINE)
        await connecting.wait()
        pass_deadlines(g)
        go_on.set()
        assert (await client.answer()).status == 504
        assert a.seen == []
        assert (pool.stats.open, pool.stats.idle) == (1, 1)  # the connection is kept for the next
        assert g.in_flight == 0
        client.close()


@pytest.fixture
async def slow() -> AsyncIterator[Fleet]:
    async with Fleet.of(ReplicaSettings()) as fleet:
        yield fleet


async def test_on_the_running_product(slow: Fleet) -> None:
    """10,000 tokens at 10 ms or more each take far longer than any deadline here; streams are first let begin."""
    async with running(*slow.urls) as g:
        long = {"model": "sim", "max_tokens": 10_000, "ignore_eos": True}
        prompts = {"chat/completions": {"messages": [{"role": "user", "content": "x"}]}, "completions": {"prompt": "x"}}
        for path, prompt in prompts.items():
            whole = await g.http.post(f"/v1/{path}", json=long | prompt, headers={"x-deadline-ms": "500"})
            assert (whole.status_code, whole.json()["error"]["code"]) == (504, "expired")
        asked = [
            asyncio.create_task(
                g.http.post(f"/v1/{path}", json=long | prompt | {"stream": True}, headers={"x-deadline-ms": "3600000"})
            )
            for path, prompt in prompts.items()
        ]
        await until_true(lambda: sum(e.record.first_content_at is not None for e in g.gateway.proxy.live) == 2)
        g.gateway.scheduler._apply(g.gateway.balancer.wake(time.monotonic() + 7200.0))
        for streamed in asked:
            assert '"code":"expired"' in (await streamed).text.split("\n\n")[-2]
        await until_true(lambda: not slow.members[0].replica.engine.running)
        assert g.gateway.balancer.fleet.replicas["r0"].ledger.in_flight == 0
