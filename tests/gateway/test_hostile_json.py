"""Bodies that nobody means: the replica judges them, and the gateway neither fails nor is held up by them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import answer, openai, retry
from gateway.endpoints import ALLOW
from gateway.errors import Api, GatewayError
from gateway.sse import EventScanner
from policies.phrases import phrases
from policies.places import path as place
from tests.gateway.scripted import gateway, playing, replica
from tests.gateway.test_failures import GOOD_WHOLE

DEEP = b"[" * 990 + b"]" * 990


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":%b}]}' % DEEP),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"tools":%b}' % DEEP),
        ("/v1/completions", b'{"prompt":%b}' % DEEP),
        ("/v1/responses", b'{"input":%b}' % DEEP),
        ("/v1/messages", b'{"messages":%b}' % DEEP),
        ("/v1/chat/completions", b'{"stream":true,"stream_options":{"x":%b}}' % DEEP),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":[{"type":["text"],"text":"a"}]}]}'),
        ("/v1/messages", b'{"messages":[{"role":"user","content":[{"type":{"a":1},"text":"a"}]}]}'),
    ],
)
async def test_a_body_deep_or_odd_reaches_the_replica_as_it_came(path: str, body: bytes) -> None:
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        answer = await g.post(path, body)
        assert (answer.status, a.seen[0].body) == (200, body)
        assert (g.in_flight, len(g.proxy.live)) == (0, 0)


async def test_the_length_of_a_prompt_of_too_many_parts_is_that_of_its_body() -> None:
    body = b'{"prompt":[%b]}' % b",".join([b"[1]"] * 50_000)
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        await g.post("/v1/completions", body)
        assert (await g.record()).prompt_bytes == len(body)


# -- any JSON, where names are those that are read ---------------------------------------------------------------------

NAMES = [
    "model", "messages", "prompt", "input", "role", "content", "type", "text", "stream", "stream_options",
    "include_usage", "n", "max_tokens", "tools", "session_id", "choices", "delta", "finish_reason", "usage",
    "prompt_tokens", "completion_tokens", "prompt_tokens_details", "cached_tokens", "input_tokens", "output_tokens",
    "input_tokens_details", "error", "code", "message", "response", "id", "status", "incomplete_details", "reason",
    "stop_reason", "system", "instructions", "cache_salt", "documents", "tool_use_id", "previous_response_id",
]  # fmt: skip
WORDS = [
    "text", "tool_result", "tool_use", "stop", "abort", "error", "response.created", "response.completed",
    "response.incomplete", "response.failed", "response.output_text.delta", "content_block_delta", "message_start",
    "message_delta", "message_stop", "incomplete", "cancelled",
]  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.sampled_from(WORDS), st.text(max_size=3),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from([0, 1, -1, 2**31, 2**31 + 1, 2**63, 2**64 - 1, 10**30]),
)  # fmt: skip
ANY = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)
OBJECT = st.dictionaries(st.sampled_from(NAMES), ANY, max_size=6)
CHOICES = st.lists(st.fixed_dictionaries({"delta": ANY, "text": ANY, "finish_reason": ANY}), max_size=2)
EVENT = st.one_of(
    ANY,
    st.fixed_dictionaries({"choices": CHOICES | ANY, "usage": ANY}),
    st.fixed_dictionaries({"type": st.sampled_from(WORDS) | ANY, "response": OBJECT | ANY, "delta": ANY, "usage": ANY}),
    st.fixed_dictionaries({"error": OBJECT | ANY}),
    st.fixed_dictionaries(
        {"status": st.just("incomplete"), "incomplete_details": st.fixed_dictionaries({"reason": ANY})}
    ),
)


@given(api=st.sampled_from(Api), events=st.lists(EVENT, min_size=1, max_size=3), cut=st.integers(0, 400))
def test_whatever_a_replica_says_an_event_has_a_class_and_passes(api: Api, events: list[Any], cut: int) -> None:
    raw = b"".join([b"data: %b\n\n" % json.dumps(event).encode() for event in events])
    scan = EventScanner(api)
    found = [*scan.split(raw[:cut]), *scan.split(raw[cut:])]
    assert b"".join([event for event, _ in found]) == raw
    assert scan.finish is None or isinstance(scan.finish, str)
    if scan.error is not None:
        status, _ = retry.of_error_event(scan.error)
        assert 400 <= status < 600


@given(api=st.sampled_from(Api), said=EVENT)
def test_whatever_an_answer_holds_it_can_be_read(api: Api, said: Any) -> None:
    body = json.dumps(said).encode()
    reading = answer.read(api, body)
    assert reading.aborted in (True, False)
    long = answer.Long(api, b'{"id":"x",')
    long.add(b'"usage":{"prompt_tokens":7},"usage":' + body)
    long.usage()


@given(path=st.sampled_from(sorted(ALLOW)), document=OBJECT)
def test_whatever_a_client_sends_is_read_or_refused(path: str, document: dict[str, Any]) -> None:
    endpoint, body = ALLOW[path], json.dumps(document).encode()
    try:
        call = openai.parse(endpoint, {}, body, ask_usage=True)
    except GatewayError:  # its model is no text
        assert not isinstance(document["model"], str)
        return
    parts = call.canonical(endpoint, "m", None)
    if call.document is not None:
        phrases(parts, call.document, 7)
        for number in range(len(parts) // 2):
            assert place(endpoint.api, call.document, parts, number)
    if not call.withholds_usage:
        assert b"".join(call.parts) == body


@pytest.mark.parametrize("usage", [b"[" * 9000, b'{"a":' * 3000, b'{"prompt_tokens":%b}' % (b"9" * 9000)])
def test_usage_that_cannot_be_read_at_the_end_of_a_long_answer_is_none(usage: bytes) -> None:
    long = answer.Long(Api.CHAT, b"{")
    long.add(b'"usage":{"prompt_tokens":7},"usage":{"x":' + usage)
    assert long.usage() is None


DEEP_EVENTS = {
    "finish reason": (Api.CHAT, b'{"choices":[{"finish_reason":%b}]}'),
    "type": (Api.RESPONSES, b'{"type":%b}'),
    "id": (Api.RESPONSES, b'{"type":"response.created","response":{"id":%b}}'),
    "stop reason": (Api.MESSAGES, b'{"type":"message_delta","delta":{"stop_reason":%b}}'),
    "error": (Api.CHAT, b'{"error":%b}'),
    "message": (Api.CHAT, b'{"error":{"message":%b}}'),
}


@pytest.mark.parametrize("what", DEEP_EVENTS)
def test_what_should_be_text_and_is_a_list_a_thousand_deep_is_no_text(what: str) -> None:
    api, text = DEEP_EVENTS[what]
    scan = EventScanner(api)
    scan.split(b"data: %b\n\n" % (text % DEEP))
    assert (scan.finish or "", scan.first_id) == ("", "")
    if scan.error is not None:
        assert retry.of_error_event(scan.error)[0] == 500
