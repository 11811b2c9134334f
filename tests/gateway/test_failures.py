"""What a replica may do to a request, and what the client sees of it."""

from __future__ import annotations

import asyncio
import time

import orjson
import pytest

from gateway import waits
from gateway.connecting import connect
from gateway.upstream import Pool
from tests.gateway.scripted import CHAT, Connection, Seen, dechunk, gateway, playing, reads, replica, until

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
ENGINE_DEAD = b"EngineCore encountered an issue. See stack trace (above) for the root cause."
POOL_CLOSED = (  # vLLM 0.32 to a new chat while it drains
    b'{"error":{"message":"cannot schedule new futures after shutdown","type":"InternalServerError","param":null,'
    b'"code":500}}'
)
WHOLE = b'{"model":"tiny","prompt":"x"}'


def event(text: str, finish: str | None = None, kind: str = "chat") -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    if kind == "completions":
        choice = {"index": 0, "text": text, "finish_reason": finish}
    return chunk(b"data: " + orjson.dumps({"id": "c", "choices": [choice]}) + b"\n\n")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def error_event(code: int, message: bytes = b"busy") -> bytes:
    return chunk(b'data: {"error": {"message": "%b", "type": "E", "param": null, "code": %d}}\n\n' % (message, code))


def whole(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


GOOD_STREAM = [STREAM_HEAD, event("a"), event("b", "stop"), DONE]
GOOD_WHOLE = [whole(b"200 OK", b'{"choices":[{"text":"ok","finish_reason":"stop"}],"usage":{"completion_tokens":1}}')]
ABORTED = whole(b"200 OK", b'{"choices":[{"text":"","finish_reason":"abort"}],"usage":{"completion_tokens":0}}')


async def cut(connection: Connection, request: Seen) -> None:
    connection.writer.transport.abort()


async def fin(connection: Connection, request: Seen) -> None:
    connection.writer.close()


BEFORE_COMMIT = {
    "reset": cut,
    "FIN with zero bytes": fin,
    "502": playing([whole(b"502 Bad Gateway", b"{}")]),
    "503 of the queue limit": playing([whole(b"503 Service Unavailable", b'{"error":{"message":"busy"}}')]),
    "500 of a dead engine": playing([whole(b"500 Internal Server Error", b'{"error":"%b"}' % ENGINE_DEAD)]),
    "500 of a drain": playing([whole(b"500 Internal Server Error", POOL_CLOSED)]),
    "no HTTP": playing([b"SSH-2.0-OpenSSH\r\n\r\n"]),
    "abort with nothing generated": playing([STREAM_HEAD, event("", "abort"), DONE]),
    "error event 503": playing([STREAM_HEAD, error_event(503), DONE]),
    "error event of a dead engine": playing([STREAM_HEAD, error_event(500, ENGINE_DEAD), DONE]),
    "end before content": playing([STREAM_HEAD, chunk(b": keep-alive\n\n"), b"0\r\n\r\n"]),
    "bad chunk": playing([STREAM_HEAD, b"zz\r\ndata: {}\r\n"]),
}


@pytest.mark.parametrize("fault", BEFORE_COMMIT)
async def test_before_commit_another_replica_answers(fault: str) -> None:
    async with replica(BEFORE_COMMIT[fault]) as bad, replica(playing(GOOD_STREAM)) as good, gateway(bad, good) as g:
        answer = await g.post("/v1/chat/completions", CHAT)
        assert answer.status == 200
        assert answer.body == dechunk(b"".join(GOOD_STREAM[1:]))
        assert answer.header("x-forebay-replica") == "r1"
        record = await g.record()
        assert [a.replica_id for a in record.attempts] == ["r0", "r1"]
        assert record.outcome == "success"
        assert g.in_flight == 0


async def test_a_draining_black_hole_is_passed_over_and_ejected() -> None:
    """It answers 200 with abort and nothing, faster than all others."""
    async with replica(playing([ABORTED])) as hole, replica(playing(GOOD_WHOLE)) as good, gateway(hole, good) as g:
        for _ in range(4):
            answer = await g.post("/v1/completions", WHOLE)
            assert orjson.loads(answer.body)["choices"][0]["text"] == "ok"
        assert len(hole.seen) == 1
        assert not g.fleet.available("r0")


async def test_a_draining_replica_that_cannot_render_prompts_is_passed_over_and_ejected() -> None:
    failing = playing([whole(b"500 Internal Server Error", POOL_CLOSED)])
    async with replica(failing) as hole, replica(playing(GOOD_WHOLE)) as good, gateway(hole, good) as g:
        for _ in range(4):
            assert (await g.post("/v1/completions", WHOLE)).status == 200
        assert len(hole.seen) == 1
        assert not g.fleet.available("r0")


async def test_words_of_a_drain_inside_another_500_change_nothing() -> None:
    quoted = b'{"error":{"message":"bad \\"message\\":\\"cannot schedule new futures after shutdown","code":500}}'
    failing = playing([whole(b"500 Internal Server Error", quoted)])
    async with replica(failing) as a, replica(playing(GOOD_WHOLE)) as b, gateway(a, b) as g:
        assert (await g.post("/v1/completions", WHOLE)).status == 500
        assert g.fleet.available("r0")


async def test_refused_connections_go_elsewhere() -> None:
    async with replica(playing(GOOD_WHOLE)) as good, gateway("http://127.0.0.1:1", good) as g:
        answer = await g.post("/v1/completions", WHOLE)
        assert answer.status == 200
        assert [a.detail for a in (await g.record()).attempts] == ["refused", ""]


async def test_500_is_repeated_only_when_the_replica_refuses_connections_after_it() -> None:
    failing = playing([whole(b"500 Internal Server Error", b'{"error":{"message":"odd request"}}')])
    async with replica(failing) as a, replica(playing(GOOD_WHOLE)) as b, gateway(a, b) as g:
        answer = await g.post("/v1/completions", WHOLE)
        assert (answer.status, answer.body) == (500, b'{"error":{"message":"odd request"}}')
        assert len(b.seen) == 0

    async def dying(connection: Connection, request: Seen) -> None:
        assert a.server is not None
        a.server.close()
        await failing(connection, request)

    async with replica(dying) as a, replica(playing(GOOD_WHOLE)) as b, gateway(a, b) as g:
        assert (await g.post("/v1/completions", WHOLE)).status == 200
        assert [at.detail for at in (await g.record()).attempts] == ["engine_dead", ""]


async def test_in_band_error_becomes_a_true_status_when_nobody_else_is_there() -> None:
    async with replica(playing([STREAM_HEAD, error_event(503), DONE])) as a, gateway(a) as g:
        answer = await g.post("/v1/chat/completions", CHAT)
        assert answer.status == 503
        assert orjson.loads(answer.body)["error"]["message"] == "busy"
        assert answer.header("content-type") == "application/json"
        assert (await g.record()).outcome == "backpressure"
        assert g.fleet.available("r0")


async def test_when_all_break_the_client_gets_502_in_its_own_form() -> None:
    async with replica(cut) as a, replica(cut) as b, gateway(a, b) as g:
        answer = await g.post("/v1/messages", CHAT)
        assert answer.status == 502
        error = orjson.loads(answer.body)
        assert (error["type"], error["error"]["type"], error["error"]["code"]) == ("error", "api_error", "upstream")
        record = await g.record()
        assert (record.outcome, record.partition) == ("error", "error_transport")


AFTER_COMMIT = {
    "reset": (cut, "early_end", True),
    "FIN": (fin, "early_end", True),
    "zero chunk without DONE": (playing([b"0\r\n\r\n"]), "early_end", True),
    "error event": (playing([error_event(500, ENGINE_DEAD), DONE]), "engine_dead", False),
    "abort": (playing([event("last", "abort"), DONE]), "abort", True),
}


@pytest.mark.parametrize("fault", AFTER_COMMIT)
@pytest.mark.parametrize("spliced", [True, False], ids=["spliced", "asgi"])
async def test_after_commit_there_is_an_error_event_and_no_end(fault: str, spliced: bool) -> None:
    then, detail, ours = AFTER_COMMIT[fault]

    async def script(connection: Connection, request: Seen) -> None:
        await connection.send(STREAM_HEAD, event("first"))
        await seen_first.wait()
        await then(connection, request)

    seen_first = asyncio.Event()
    async with (
        replica(script) as a,
        replica(playing(GOOD_STREAM)) as b,
        gateway(a, b, spliced=spliced) as g,
    ):
        client = await g.connect()
        await client.post("/v1/chat/completions", CHAT)
        await client.head()
        await client.reader.readuntil(b"first")
        seen_first.set()
        rest = await client.reader.readuntil(b"0\r\n\r\n")
        assert b"[DONE]" not in rest
        assert rest.count(b'"error"') == 1
        assert (b'"code":"upstream"' in rest) == ours
        record = await g.record()
        assert (record.outcome, record.partition, record.reason) == ("truncated", "truncated", detail)
        assert len(b.seen) == 0
        client.close()


async def test_retry_budget_bounds_the_load_on_a_fleet_in_trouble() -> None:
    busy = playing([whole(b"503 Service Unavailable", b"{}")])
    settings = "retry.budget_share = 0.1\nretry.budget_per_s = 0.0"
    async with replica(busy) as a, replica(busy) as b, gateway(a, b, settings=settings) as g:
        for _ in range(40):
            assert (await g.post("/v1/completions", WHOLE)).status == 503
        # 10 saved up, and one more for each ten requests
        assert len(a.seen) + len(b.seen) == 40 + 10 + 3


async def test_stale_connection_is_repeated_once_on_the_same_replica() -> None:
    """The replica closes an idle connection at the moment it is used again: no byte came, so nobody notices."""
    answered = 0

    async def script(connection: Connection, request: Seen) -> None:
        nonlocal answered
        answered += 1
        if answered == 2:
            connection.writer.transport.abort()
        else:
            await connection.send(*GOOD_WHOLE)

    async with replica(script) as a, gateway(a, settings="retry.budget_share = 0.0") as g:
        for _ in range(2):
            assert (await g.post("/v1/completions", WHOLE)).status == 200
        assert a.connections == 2
        record = await g.record(2)
        assert len(record.attempts) == 1
        assert g.fleet.health.records["r0"].failed_in_row == 0


async def test_a_reused_connection_that_dies_after_a_byte_is_a_failure() -> None:
    answered = 0

    async def script(connection: Connection, request: Seen) -> None:
        nonlocal answered
        answered += 1
        if answered == 2:
            await connection.send(b"HTTP/1.1 200 OK\r\ncontent-le")
            connection.writer.close()
        else:
            await connection.send(*GOOD_WHOLE)

    async with replica(script) as a, gateway(a) as g:
        assert (await g.post("/v1/completions", WHOLE)).status == 200
        assert (await g.post("/v1/completions", WHOLE)).status == 502
        assert len(a.seen) == 2


async def test_idle_connections_are_retired_before_the_replica_closes_them() -> None:
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a, settings="timeouts.pool_idle_s = 0.05") as g:
        assert (await g.post("/v1/completions", WHOLE)).status == 200
        pool = g.proxy.pool("r0")
        assert pool is not None
        await until(lambda: not pool.stats.open)
        assert (await g.post("/v1/completions", WHOLE)).status == 200
        assert a.connections == 2


async def silent(connection: Connection, request: Seen) -> None:
    await connection.peer_left()


async def one_event_then_silence(connection: Connection, request: Seen) -> None:
    await connection.send(STREAM_HEAD, event("first"))
    while not connection.reader.at_eof():
        await connection.send(chunk(b": keep-alive\n\n"))  # no sign of an engine's life
        await asyncio.sleep(0.02)


async def test_no_first_event_in_time_goes_elsewhere() -> None:
    async with replica(silent) as a, replica(playing(GOOD_STREAM)) as b, gateway(a, b) as g:
        answered = asyncio.create_task(g.post("/v1/chat/completions", CHAT))
        await until(lambda: a.seen)
        (exchange,) = g.proxy.live
        exchange.on_tick(time.monotonic() + 120.0)  # as the sweep does after that time: b has it all before it
        assert (await answered).body.endswith(b"[DONE]\n\n")
        assert [at.detail for at in (await g.record()).attempts] == ["first_event_timeout", ""]


async def test_silence_in_mid_stream_is_not_hidden_by_comments() -> None:
    async with replica(one_event_then_silence) as a, gateway(a, settings="timeouts.idle_s = 0.1") as g:
        answer = await g.post("/v1/chat/completions", CHAT)
        assert b'"code":"upstream"' in answer.body
        assert b"[DONE]" not in answer.body
        assert (await g.record()).reason == "idle_timeout"


async def test_early_commit_sends_comments_then_the_stream() -> None:
    release = asyncio.Event()

    async def script(connection: Connection, request: Seen) -> None:
        await connection.send(STREAM_HEAD)
        await release.wait()
        await connection.send(*GOOD_STREAM[1:])

    settings = "stream.commit_after_s = 0.05\nstream.keep_alive_comment_s = 0.3"
    async with replica(script) as a, gateway(a, settings=settings) as g:
        client = await g.connect()
        await client.post("/v1/chat/completions", CHAT)
        head = await client.head()
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        for _ in range(2):
            await client.reader.readuntil(b": keep-alive\n\n\r\n")
        release.set()
        rest = await client.reader.readuntil(b"0\r\n\r\n")
        told = dechunk(rest).replace(b": keep-alive\n\n", b"")  # another may have been due before the stream came
        assert told == dechunk(b"".join(GOOD_STREAM[1:]))
        client.close()


async def test_after_early_commit_a_failure_is_an_event_and_another_replica_may_still_answer() -> None:
    async def late(connection: Connection, request: Seen) -> None:
        await connection.send(STREAM_HEAD)
        await commenting.wait()
        connection.writer.close()

    settings = "stream.commit_after_s = 0.05"
    for then, expected in ((GOOD_STREAM, b"[DONE]"), ([whole(b"400 Bad Request", b'{"error":{"code":400}}')], b"400")):
        commenting = asyncio.Event()
        async with replica(late) as a, replica(playing(then)) as b, gateway(a, b, settings=settings) as g:
            client = await g.connect()
            await client.post("/v1/chat/completions", CHAT)
            await client.reader.readuntil(b": keep-alive\n\n\r\n")
            commenting.set()
            rest = await client.reader.readuntil(b"0\r\n\r\n")
            assert expected in rest
            client.close()


async def test_whole_answers_never_commit_early() -> None:
    release = asyncio.Event()

    async def script(connection: Connection, request: Seen) -> None:
        await release.wait()
        await connection.send(whole(b"400 Bad Request", b'{"error":{"code":400}}'))

    async with replica(script) as a, gateway(a, settings="stream.commit_after_s = 0.01") as g:
        client = await g.connect()
        await client.post("/v1/completions", WHOLE)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.6):
                await client.reader.read(1)
        release.set()
        assert (await client.answer()).status == 400
        client.close()


async def test_recorded_overload_stream_is_retried() -> None:
    _, _, good = reads("sse-chat-usage.txt")
    overloaded = playing([STREAM_HEAD, error_event(503, b"The engine is currently busy"), DONE])
    async with replica(overloaded) as a, replica(playing(good)) as b, gateway(a, b) as g:
        answer = await g.post("/v1/chat/completions", CHAT)
        assert answer.status == 200
        assert b"error" not in answer.body
        assert g.fleet.available("r0")  # load, not ill health


@pytest.mark.plain
@pytest.mark.parametrize("after", [0, 1], ids=["new connection", "reused connection"])
async def test_a_connection_that_breaks_as_it_is_taken_is_an_attempt_that_failed(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport knows and the loop has not told us yet: writing to it would be our own failure."""
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        pool = g.proxy.pool("r0")
        assert pool is not None
        for _ in range(after):
            assert (await g.post("/v1/completions", WHOLE)).status == 200
        take, broken = pool.take, 0

        def broken_take() -> object:
            nonlocal broken
            connection = take()
            if connection is not None:
                broken += 1
                connection.transport.abort()
            return connection

        async def broken_connect(pool: Pool) -> object:
            nonlocal broken
            connection = await connect(pool)
            if not broken:
                broken += 1
                connection.transport.abort()
            return connection

        monkeypatch.setattr(pool, "take", broken_take)
        monkeypatch.setattr(waits, "connect", broken_connect)
        answer = await g.post("/v1/completions", WHOLE)
        assert answer.status == (200 if after else 502)  # a reused one is repeated, as when it was closed while idle
        assert broken == 1
        await until(lambda: pool.stats.open == pool.stats.idle)
