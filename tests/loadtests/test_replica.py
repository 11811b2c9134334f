"""The simulated replica on the wire: the recorded shapes, official clients, cache over turns, faults."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from loadtests.faults import Command
from loadtests.profiles import Profile
from loadtests.replica import EngineConfig, Fleet, ReplicaSettings

CAPTURES = Path(__file__).resolve().parent.parent / "captures"
# a millisecond a step: streams last as long as they have tokens
QUICK = Profile("quick", 0.001, 0.0, 1e-6, 0.0, 0.0, num_blocks=2001, block_size=16)
SETTINGS = ReplicaSettings(EngineConfig(QUICK, max_model_len=8192), model="tiny")


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet.of(SETTINGS, 2) as running:
        yield running


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fleet.urls[0], timeout=10) as http:
        yield http


async def raw(url: str, path: str, body: dict[str, Any], more: str = "") -> bytes:
    """All bytes of one answer, as a socket sees them."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = orjson.dumps(body)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
        + data
    )
    answer = await reader.read()
    writer.close()
    return answer


def recorded(name: str, request: str = "") -> bytes:
    """The bytes that came back, from a capture of one or several exchanges."""
    text = (CAPTURES / name).read_text()
    if request:
        text = text[text.index(request) :]
        text = text[: text.find("\n## ", 5)] if "\n## " in text[5:] else text
    return b"".join(eval(line[line.index("b'") :]) for line in text.splitlines() if re.match(r"\+ *[\d.]+ms b'", line))


def skeleton(answer: bytes) -> list[str]:
    """What must be equal: framing, keys and their order, event names; not ids, times, words and counts."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = [line.split(b":")[0].decode() for line in head.split(b"\r\n")]
    if b"chunked" not in head:
        return [*lines, shape_of(orjson.loads(body))]
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        data, body = rest[:length], rest[length + 2 :]
        lines.append("chunk")
        for line in data.decode().split("\n"):
            if line.startswith("data: {"):
                lines.append(f"data: {shape_of(orjson.loads(line[6:]))}")
            else:
                lines.append(line)
    return lines


def shape_of(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{v!r}" if k in FIXED else f"{k}:{shape_of(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(shape_of(v) for v in value) + "]"
    return type(value).__name__


FIXED = {"object", "finish_reason", "role", "type", "status", "stop_reason", "index", "model", "completion_tokens"}

CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "where is the river"}],
    "max_tokens": 4,
    "temperature": 0,
}
TEXT = {"model": "tiny", "prompt": "where is the river", "max_tokens": 4, "temperature": 0}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ALL_USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
IDS = {"model": "tiny", "prompt": [400, 401, 402, 403], "max_tokens": 3, "stream": True, "return_token_ids": True}


@pytest.mark.parametrize(
    ("capture", "path", "body"),
    [
        ("sse-chat.txt", "/v1/chat/completions", CHAT | {"stream": True}),
        ("sse-chat-usage.txt", "/v1/chat/completions", CHAT | USAGE),
        ("sse-chat-continuous-usage.txt", "/v1/chat/completions", CHAT | ALL_USAGE),
        ("sse-completions.txt", "/v1/completions", TEXT | {"stream": True}),
        ("sse-completions-usage.txt", "/v1/completions", TEXT | USAGE),
        ("sse-completions-return-token-ids.txt", "/v1/completions", IDS),
        ("chat-nonstream.txt", "/v1/chat/completions", CHAT | {"max_tokens": 3}),
    ],
)
async def test_answers_have_the_recorded_bytes_but_for_ids_words_and_counts(
    fleet: Fleet, capture: str, path: str, body: dict[str, Any]
) -> None:
    assert skeleton(await raw(fleet.urls[0], path, body)) == skeleton(recorded(capture))


@pytest.mark.parametrize(
    ("request_line", "path", "body"),
    [
        (
            ">>> POST /v1/responses",
            "/v1/responses",
            {"model": "tiny", "input": "where is the river", "max_output_tokens": 3, "stream": True},
        ),
        (
            ">>> POST /v1/messages",
            "/v1/messages",
            {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 3, "stream": True},
        ),
    ],
)
async def test_the_events_of_responses_and_messages_are_those_recorded(
    fleet: Fleet, request_line: str, path: str, body: dict[str, Any]
) -> None:
    def events(answer: bytes) -> list[str]:
        # each kind of event once, in order: the recorded machine put two of the three tokens into one delta
        data = [line for line in skeleton(answer) if line.startswith("data: ")]
        return list(dict.fromkeys(data))

    ours = await raw(fleet.urls[0], path, body)
    theirs = recorded("sse-responses-messages-n.txt", request_line)
    assert events(ours) == events(theirs)
    assert ours.endswith(b"\n\n\r\n0\r\n\r\n")
    assert b"[DONE]" not in ours


def recorded_errors() -> dict[str, tuple[int, Any]]:
    found = {}
    for part in (CAPTURES / "errors.txt").read_text().split("### ")[1:]:
        name, _, rest = part.partition("\n")
        found[name] = (int(rest.split(" ")[1]), orjson.loads(rest[rest.index("\n{") :].strip()))
    return found


ERRORS: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown model": ("/v1/completions", {"model": "nope", "prompt": "a"}),
    "missing messages": ("/v1/chat/completions", {"model": "tiny"}),
    "prompt too long (token array of 9000 > max_model_len 8192)": ("/v1/completions", {"prompt": [5] * 9000}),
    "prompt too long (stream)": ("/v1/completions", {"prompt": [5] * 9000, "stream": True}),
    "bad type: max_tokens string": ("/v1/completions", {"prompt": "a", "max_tokens": "x"}),
    "negative max_tokens": ("/v1/completions", {"prompt": "a", "max_tokens": -1}),
    "temperature -1": ("/v1/completions", {"prompt": "a", "temperature": -1}),
    "stream_options without stream": ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}),
    "empty prompt": ("/v1/completions", {"prompt": ""}),
    "cache_salt empty": ("/v1/completions", {"prompt": "a", "cache_salt": ""}),
}


@pytest.mark.parametrize("name", ERRORS)
async def test_errors_have_the_recorded_status_and_body(client: httpx.AsyncClient, name: str) -> None:
    path, body = ERRORS[name]
    answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()) == recorded_errors()[name]


async def test_unknown_paths_and_methods_answer_as_the_framework_does(client: httpx.AsyncClient) -> None:
    recording = recorded_errors()
    unknown, method = await client.get("/nowhere"), await client.get("/v1/completions")
    assert (unknown.status_code, unknown.json()) == recording["unknown path"]
    assert (method.status_code, method.json()) == recording["GET on POST route"]
    assert method.headers["allow"] == "POST"


async def test_the_answer_sent_back_hits_the_cache(client: httpx.AsyncClient) -> None:
    messages = [{"role": "system", "content": "word " * 200}, {"role": "user", "content": "one"}]
    body = {"messages": messages, "max_tokens": 64, "ignore_eos": True}
    first = (await client.post("/v1/chat/completions", json=body)).json()
    answer = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "two"}]
    second = (await client.post("/v1/chat/completions", json=body)).json()
    computed = first["usage"]["total_tokens"] - 1  # the last token was never computed
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16
    assert second["usage"]["prompt_tokens"] > computed


async def test_a_salt_shares_nothing(client: httpx.AsyncClient) -> None:
    cached = []
    for salt in (None, "a", "a", "b"):
        body = {"prompt": "word " * 100, "max_tokens": 1} | ({"cache_salt": salt} if salt else {})
        answer = await client.post("/v1/completions", json=body)
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 112, 0]


async def test_token_ids_of_a_text_hit_what_the_text_left(client: httpx.AsyncClient) -> None:
    ids = (await client.post("/tokenize", json={"prompt": "word " * 100})).json()["tokens"]
    assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "word " * 100}
    await client.post("/v1/completions", json={"prompt": "word " * 100, "max_tokens": 1})
    answer = await client.post("/v1/completions", json={"prompt": ids, "max_tokens": 1})
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 112


async def test_lengths_are_honoured(client: httpx.AsyncClient) -> None:
    async def ask(**more: object) -> tuple[int, str]:
        answer = (await client.post("/v1/completions", json={"prompt": "a", **more})).json()
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    assert await ask() == (16, "length")
    assert await ask(max_tokens=700, ignore_eos=True) == (700, "length")
    natural, reason = await ask(max_tokens=700)
    assert 32 <= natural <= 368
    assert reason == "stop"
    assert await ask(max_tokens=700, min_tokens=500) == (500, "stop")


async def test_samples_and_prompts_are_numbered_through(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 3}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert len({c["text"] for c in answer["choices"]}) == 4
    assert answer["usage"]["completion_tokens"] == 12


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  the condition is plain state of the replica, it has no event
            await asyncio.sleep(0.001)


async def start_stream(url: str, tokens: int = 5000) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
    data = orjson.dumps({"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True})
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
    await reader.readuntil(b'"text"')
    return reader, writer


async def test_a_client_that_leaves_aborts_its_request(fleet: Fleet) -> None:
    replica = fleet.members[0].replica
    _, writer = await start_stream(fleet.urls[0])
    assert len(replica.engine.running) == 1
    writer.close()
    await until(lambda: not replica.engine.running)
    assert replica.engine.counters.aborted == 1
    assert replica.engine.pool.free == replica.engine.pool.usable
    assert sum(replica.figures.reasons.values()) == 0  # an abort shows in no metric, as in vLLM


async def test_requests_on_one_connection_are_answered_in_order(fleet: Fleet) -> None:
    host, port = fleet.urls[0].removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /load HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    assert answer.index(b'{"version":"0.32.0"}') < answer.index(b'{"server_load":0}')
    writer.close()


async def test_official_clients_work_unchanged(fleet: Fleet) -> None:
    import anthropic
    import openai

    async with openai.AsyncOpenAI(base_url=fleet.urls[0] + "/v1", api_key="none") as client:
        assert [m.id async for m in await client.models.list()] == ["tiny"]
        chat = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5
        )
        streamed = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in streamed if c.choices])
        assert text == chat.choices[0].message.content
        response = await client.responses.create(model="tiny", input="hi", max_output_tokens=5)
        assert response.output_text == text
        events = [e.type async for e in await client.responses.create(model="tiny", input="hi", stream=True)]
        assert (events[0], events[-1]) == ("response.created", "response.completed")
    async with anthropic.AsyncAnthropic(base_url=fleet.urls[0], api_key="none") as claude:
        message = await claude.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
        assert message.content[0].text == text  # type: ignore[union-attr]
        async with claude.messages.stream(
            model="tiny", max_tokens=5, messages=[{"role": "user", "content": "hi"}]
        ) as stream:
            assert "".join([t async for t in stream.text_stream]) == text


async def test_metrics_are_read_by_the_gateway_as_vllms_own(fleet: Fleet, client: httpx.AsyncClient) -> None:
    from gateway.vllm_metrics import read

    await client.post("/v1/completions", json={"prompt": "word " * 100, "max_tokens": 20, "ignore_eos": True})
    await client.post("/v1/completions", json={"prompt": "word " * 100, "max_tokens": 20, "ignore_eos": True})
    answer = await client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
    seen = read(answer.text, "r", 1.0)
    assert (seen.running, seen.waiting, seen.kv_usage, seen.awake) == (0, 0, 0, True)
    assert (seen.num_gpu_blocks, seen.block_size) == (2001, 16)
    assert (seen.prompt_tokens, seen.generation_tokens, seen.preemptions) == (250, 40, 0)
    assert (seen.prefix_queries, seen.prefix_hits) == (250, 112)
    assert seen.iterations == 40


# -- faults ---------------------------------------------------------------------------------------------------------


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
        await client.post("/v1/completions", json={"prompt": "b", "max_tokens": 1}, timeout=0.05)
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


async def test_a_fault_can_end_by_itself(fleet: Fleet, client: httpx.AsyncClient) -> None:
    await fault(client, "refuse", for_s=0.05)
    await until(lambda: not fleet.members[0].listening)
    await until(lambda: fleet.members[0].listening)


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
