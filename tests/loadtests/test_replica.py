"""The simulated replica on the wire: the recorded shapes, official clients, cache over turns, faults."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
from typer.testing import CliRunner

from loadtests import cli, ports
from loadtests.replica import Fleet
from tests.loadtests.on_wire import CAPTURES, SETTINGS, raw, start_stream, until


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet.of(SETTINGS, 2) as running:
        yield running


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fleet.urls[0], timeout=10) as http:
        yield http


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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[]]}),
        ("/v1/completions", {"prompt": {"text": "a"}}),
        ("/v1/chat/completions", {"messages": ["hi"]}),
        ("/v1/chat/completions", {"messages": [], "stream_options": 3, "stream": True}),
        ("/v1/responses", {"input": 5}),
        ("/v1/completions", {"prompt": "a", "n": "two"}),
        ("/v1/completions", {"prompt": "a", "n": 2**64 - 1}),
    ],
)
async def test_a_body_of_the_wrong_shape_is_a_400_and_nothing_stays_behind(
    fleet: Fleet, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert not fleet.members[0].replica.answers
    assert fleet.members[0].replica.engine.unfinished == 0


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


def test_ports_beyond_the_last_are_refused_and_not_counted_round() -> None:
    result = CliRunner().invoke(cli.build(["replica"]), ["replica", "--port", "65534", "--count", "4"])
    said = "forebay replica: --port 65534 --count 4: the last port would be 65537; at most 65535 would be right\n"
    assert (result.exit_code, result.stderr) == (2, said)


def test_a_port_that_another_has_is_named() -> None:
    with ports.hold() as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(cli.build(["replica"]), ["replica", "--port", port])
    gc.unfreeze()  # the command freezes what it has, and this process goes on
    why = "cannot listen there: Address already in use; another --host or --port would be right"
    assert (result.exit_code, result.stderr) == (2, f"forebay replica: --host 127.0.0.1 --port {port}: {why}\n")


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
