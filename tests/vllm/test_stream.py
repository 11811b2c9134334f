"""Streams of a real vLLM through the gateway: bytes, usage, cache, abort, errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serving import Gateway, chat, gateway, post, stream, streaming, wait_for
from tests.vllm.replicas import Replicas
from tests.vllm.tap import Tap

ASKED = {"stream_options": {"include_usage": True}}
PATHS = {
    "chat": ("/v1/chat/completions", chat("where is the river")),
    "completions": ("/v1/completions", {"model": "tiny", "prompt": "where is the river", "max_tokens": 8}),
    "responses": ("/v1/responses", {"model": "tiny", "input": "where is the river", "max_output_tokens": 8}),
    "messages": (
        "/v1/messages",
        {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "where is the river"}]},
    ),
}


@pytest.fixture
def tapped(replicas: Replicas) -> Iterator[Tap]:
    tap = Tap(replicas.urls[0])
    yield tap
    tap.close()


def without_usage(sent: bytes) -> bytes:
    """The same answer as vLLM gives it to a client that did not ask: its fingerprint then stands on the last choice."""
    *events, last, extra, done, end = sent.split(b"\n\n")
    assert b'"choices":[]' in extra
    assert b'"usage":{' in extra
    fingerprint = extra[extra.index(b',"system_fingerprint":') : -1]
    return b"\n\n".join([*events, last[:-1] + fingerprint + b"}", done, end])


@pytest.mark.parametrize("usage", ["ask", "off"])
@pytest.mark.parametrize("api", sorted(PATHS))
def test_the_client_gets_the_bytes_that_the_replica_sent(tapped: Tap, tmp_path: Path, api: str, usage: str) -> None:
    path, body = PATHS[api]
    with gateway([tapped.url], tmp_path, config=f'[stream]\nusage = "{usage}"\n') as front:
        answer = stream(front.url, body, path)
    (sent,) = tapped.streams()
    if usage == "ask" and api in ("chat", "completions"):  # asked for by the gateway alone: withheld from the client
        sent = without_usage(sent)
    assert answer.response.status_code == 200
    assert answer.response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert bytes(answer.body) == sent


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_usage_comes_to_the_client_that_asked(front: Gateway, api: str) -> None:
    path, body = PATHS[api]
    answer = stream(front.url, {**body, **ASKED}, path)
    assert answer.done
    assert answer.finish == "length"
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 8
    assert answer.usage["prompt_tokens"] > 0


def test_text_is_the_same_as_from_the_replica_itself(front: Gateway, replicas: Replicas) -> None:
    body = chat("the sea gives it back as rain", max_tokens=24)
    direct = stream(replicas.urls[0], body)
    assert stream(front.url, body).text == direct.text
    assert post(front.url, body).json()["choices"][0]["message"]["content"] == direct.text


def test_a_repeated_prompt_goes_where_it_is_cached_and_shows_it(front: Gateway) -> None:
    """From the second time on all whole blocks are cached, but for the last token."""
    prompt = f"run {time.time_ns()} " + "the river runs to the sea and the sea gives it back as rain " * 40
    first, *again = [stream(front.url, {**chat(prompt), **ASKED}) for _ in range(3)]
    assert first.usage is not None
    whole = (first.usage["prompt_tokens"] - 1) // 32 * 32
    assert whole > 500
    assert [a.replica for a in again] == [first.replica] * 2
    cached = [a.usage and a.usage["prompt_tokens_details"]["cached_tokens"] for a in (first, *again)]
    assert cached == [0, whole, whole]


def test_a_client_that_leaves_stops_the_engine(front: Gateway, replicas: Replicas) -> None:
    before = [replicas.generated(i) for i in range(2)]
    with streaming(front.url, chat("tell me everything", max_tokens=4000, ignore_eos=True)) as open_stream:
        seen = iter(open_stream)
        for _ in range(5):
            next(seen)
        i = replicas.index(open_stream.replica)
        wait_for(lambda: replicas.running(i) == 1, "the request runs")
    wait_for(lambda: replicas.running(i) == 0, "the engine let go of it", within_s=60)
    assert replicas.generated(i) - before[i] < 4000


def test_a_client_that_leaves_before_the_first_token_stops_the_engine(front: Gateway, replicas: Replicas) -> None:
    long = f"run {time.time_ns()} " + "the river runs to the sea and the sea gives it back as rain " * 300
    before = sum(replicas.generated(i) for i in range(2))
    impatient = httpx.Timeout(60.0, read=0.3)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{front.url}/v1/chat/completions", json=chat(long, max_tokens=4000, ignore_eos=True), timeout=impatient
        )
    for i in range(2):
        replicas.wait_idle(i)
    assert sum(replicas.generated(i) for i in range(2)) - before < 4000


def test_errors_of_the_replica_pass_through(front: Gateway, replicas: Replicas) -> None:
    too_long = chat("river " * 20_000)
    for body in (too_long, chat("x", temperature=-5), {**chat("x"), "messages": "not a list"}):
        direct, ours = post(replicas.urls[0], body), post(front.url, body)
        assert (ours.status_code, ours.json()) == (direct.status_code, direct.json())
        assert ours.status_code == 400
    unknown = post(front.url, {**chat("x"), "model": "no-such-model"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "unknown_model"
    assert post(front.url, chat("still here")).status_code == 200
