"""The official Python clients work unchanged: streams, whole answers, errors as their own exception types."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai
import pytest

from gateway.placement import Owner
from policies.model import Request, Shed
from tests.gateway.scripted import gateway, playing, reads, replica
from tests.gateway.test_failures import GOOD_STREAM, cut, error_event, event, whole

MESSAGES: list[Any] = [{"role": "user", "content": "where is the river"}]
STREAMED: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "stream": True}


def open_ai(port: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def claude(port: int) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0)


async def test_openai_chat_stream_without_and_with_usage() -> None:
    _, _, recorded = reads("sse-chat-usage.txt")
    async with replica(playing(recorded)) as a, gateway(a) as g, open_ai(g.port) as client:
        stream = await client.chat.completions.create(**STREAMED)
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "woarket shape school"
        assert [c.usage for c in chunks] == [None] * 5
        stream = await client.chat.completions.create(**STREAMED, stream_options={"include_usage": True})
        usages = [chunk.usage async for chunk in stream if chunk.usage]
        assert [u.completion_tokens for u in usages] == [4]


async def test_openai_whole_answer_and_responses_stream() -> None:
    _, _, answer = reads("chat-nonstream.txt")
    async with replica(playing(answer)) as a, gateway(a) as g, open_ai(g.port) as client:
        done = await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert done.choices[0].message.content == "woarket shape"
    _, _, recorded = reads("sse-responses-messages-n.txt", 0)
    async with replica(playing(recorded)) as a, gateway(a) as g, open_ai(g.port) as client:
        events = [e async for e in await client.responses.create(model="tiny", input="where", stream=True)]
        assert events[-1].type == "response.completed"


async def text_of(client: openai.AsyncOpenAI) -> str:
    stream = await client.chat.completions.create(**STREAMED)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def said_by(client: anthropic.AsyncAnthropic) -> str:
    async with client.messages.stream(model="tiny", max_tokens=3, messages=MESSAGES) as stream:
        return "".join([text async for text in stream.text_stream])


async def test_openai_sees_failures_as_its_own_errors() -> None:
    async with replica(cut) as a, gateway(a) as g, open_ai(g.port) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert (caught.value.status_code, caught.value.code) == (502, "upstream")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=MESSAGES)
    for rest in (error_event(500), event("x", "abort"), b""):
        script = playing([*GOOD_STREAM[:2], rest, b"0\r\n\r\n"])
        async with replica(script) as a, gateway(a) as g, open_ai(g.port) as client:
            with pytest.raises(openai.APIError):  # a status, or an event when the stream was committed before
                await text_of(client)


async def test_anthropic_stream_and_errors() -> None:
    _, _, recorded = reads("sse-responses-messages-n.txt", 1)
    async with replica(playing(recorded)) as a, gateway(a) as g, claude(g.port) as client:
        assert await said_by(client) == "fterven()"
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(model="nope", max_tokens=3, messages=MESSAGES)
        assert "does not exist" in caught.value.message
    cut_short = playing([*recorded[:4], b"0\r\n\r\n"])
    async with replica(cut_short) as a, gateway(a) as g, claude(g.port) as client:
        with pytest.raises(anthropic.APIError):
            await said_by(client)
    busy = whole(b"503 Service Unavailable", b'{"error":{"message":"busy","type":"Service Unavailable","code":503}}')
    async with replica(playing([busy])) as a, gateway(a) as g, claude(g.port) as client:
        with pytest.raises(anthropic.InternalServerError) as refused:
            await client.messages.create(model="tiny", max_tokens=3, messages=MESSAGES)
        assert refused.value.status_code == 503


Kind = type[openai.AsyncOpenAI] | type[anthropic.AsyncAnthropic]


async def ask(kind: Kind, port: int, retries: int) -> str:
    """A whole answer of the client with its own retries on."""
    if kind is openai.AsyncOpenAI:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=retries) as c:
            said = await c.chat.completions.create(model="tiny", messages=MESSAGES)
            return said.choices[0].message.content or ""
    base = f"http://127.0.0.1:{port}"
    async with anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=retries) as client:
        message = await client.messages.create(model="tiny", max_tokens=3, messages=MESSAGES)
        return getattr(message.content[0], "text", "")


ANSWERS = {
    openai.AsyncOpenAI: b'{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}',
    anthropic.AsyncAnthropic: b'{"id":"m","type":"message","role":"assistant","content":[{"type":"text","text":"ok"}],'
    b'"stop_reason":"end_turn","usage":{"input_tokens":3,"output_tokens":1}}',
}
KINDS = pytest.mark.parametrize("kind", ANSWERS, ids=["openai", "anthropic"])


@KINDS
@pytest.mark.plain
async def test_what_an_idle_fleet_could_not_meet_either_is_not_repeated(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica(playing([whole(b"200 OK", ANSWERS[kind])])) as a, gateway(a) as g:
        scheduler = g.scheduler
        monkeypatch.setattr(
            scheduler, "submit", lambda request, owner: owner.on_decision(Shed(request.id, "infeasible", None))
        )
        with pytest.raises((openai.RateLimitError, anthropic.RateLimitError)) as caught:
            await ask(kind, g.port, retries=2)
        headers = caught.value.response.headers  # type: ignore[attr-defined]
        assert headers["x-should-retry"] == "false"
        assert "retry-after" not in headers
        assert [(r.outcome, r.reason, r.client_retry) for r in g.records] == [("shed", "infeasible", 0)]
        assert a.seen == []


@KINDS
@pytest.mark.plain
async def test_what_is_infeasible_now_is_repeated_when_there_is_room_as_predicted(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica(playing([whole(b"200 OK", ANSWERS[kind])])) as a, gateway(a) as g:
        scheduler = g.scheduler
        submit, refuse = scheduler.submit, iter([True, False])

        def full_at_first(request: Request, owner: Owner) -> None:
            if next(refuse):
                owner.on_decision(Shed(request.id, "infeasible", 1.0))
            else:
                submit(request, owner)

        monkeypatch.setattr(scheduler, "submit", full_at_first)
        assert await ask(kind, g.port, retries=2) == "ok"
        second = await g.record(2)
        assert [(r.outcome, r.client_retry) for r in g.records] == [("shed", 0), ("success", 1)]
        assert second.received_at - g.records[0].received_at >= 1.0  # what Retry-After said


@KINDS
async def test_a_full_queue_is_tried_again_after_the_time_told(kind: Kind) -> None:
    async with replica(playing([whole(b"200 OK", ANSWERS[kind])])) as a, gateway(a) as g:
        g.proxy.door.lagged(0.3)
        asked = asyncio.create_task(ask(kind, g.port, retries=2))
        first = await g.record()
        g.proxy.door.lagged(0.0)
        assert await asked == "ok"
        second = await g.record(2)
        assert [(r.outcome, r.client_retry) for r in (first, second)] == [("shed", 0), ("success", 1)]
        assert second.received_at - first.received_at >= 1.0  # what Retry-After said


@KINDS
async def test_other_refusals_say_when_to_come_back(kind: Kind) -> None:
    async with replica(playing([whole(b"200 OK", ANSWERS[kind])])) as a, gateway(a) as g:
        for close, status in ((lambda: g.fleet.drain("r0"), 503), (lambda: setattr(g.proxy, "draining", True), 503)):
            close()
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
                await ask(kind, g.port, retries=0)
            response = caught.value.response  # type: ignore[attr-defined]
            assert (response.status_code, "x-should-retry" in response.headers) == (status, False)
            assert int(response.headers["retry-after"]) in (1, 2)
