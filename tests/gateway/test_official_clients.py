"""The official `openai` and `anthropic` clients, unchanged: answers, tool calls, error classes, their own retries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.scripted_replica import CUT, Answer, ScriptedReplica, captured, chunk, event, scripted_replica
from tests.serving import CHAT, Gateway, gateway

ASK: list[Any] = [{"role": "user", "content": "where is the river"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "find_river", "parameters": {"type": "object"}}}]
KEY, GUEST_KEY = "river-key", "guest-key"
TENANTS = f"""
[tenants.river]
keys_sha256 = ["{hashlib.sha256(KEY.encode()).hexdigest()}"]
[tenants.guest]
keys_sha256 = ["{hashlib.sha256(GUEST_KEY.encode()).hexdigest()}"]
classes = ["standard"]
requests_per_s = 2.0
request_burst = 1
"""
USAGE = {"prompt_tokens": 17, "completion_tokens": 2, "total_tokens": 19, "prompt_tokens_details": {"cached_tokens": 0}}
HEAD = {"id": "chatcmpl-1", "created": 1795969060, "model": "tiny"}


def chat_script(body: dict[str, Any]) -> Answer | list[bytes]:
    """Speaks by what it is told: tools, a bad temperature, or a cut in the middle."""
    text = body["messages"][-1]["content"]
    if body.get("temperature", 0) < 0:
        error = {
            "message": "temperature must be non-negative",
            "type": "BadRequestError",
            "param": "temperature",
            "code": 400,
        }
        return Answer({"error": error}, 400)
    if not body.get("stream"):
        message: dict[str, Any] = {"role": "assistant", "content": "the bank"}
        if body.get("tools"):
            function = {"name": "find_river", "arguments": '{"name": "Po"}'}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
            }
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if body.get("tools") else "stop"}
        return Answer({**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE})
    events = [chunk({"role": "assistant", "content": ""})]
    if body.get("tools"):
        for piece in ("", '{"name"', ': "Po"}'):
            call: dict[str, Any] = {"index": 0, "function": {"arguments": piece}}
            if not piece:
                call |= {"id": "call-1", "type": "function", "function": {"name": "find_river", "arguments": ""}}
            events.append(chunk({"tool_calls": [call]}))
        events.append(chunk({}, "tool_calls"))
    else:
        events += [chunk({"content": "the"}), chunk({"content": " bank"}, "stop")]
    if "cut" in text:
        return [*events[:2], CUT]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(event({**HEAD, "object": "chat.completion.chunk", "choices": [], "usage": USAGE}))
    return [*events, event("[DONE]")]


def completions_script(body: dict[str, Any]) -> Answer | list[bytes]:
    if body.get("stream"):
        return captured("sse-completions.txt")
    choice = {"index": 0, "text": "the bank", "logprobs": None, "finish_reason": "length"}
    return Answer({**HEAD, "object": "text_completion", "choices": [choice], "usage": USAGE})


def responses_script(body: dict[str, Any]) -> Answer | list[bytes]:
    events = captured("sse-responses-messages-n.txt", "## /v1/responses stream")
    if body.get("stream"):
        return events
    last = events[-1].partition(b"data: ")[2]
    return Answer(json.loads(last)["response"])


def messages_script(body: dict[str, Any]) -> Answer | list[bytes]:
    if body.get("stream"):
        events = captured("sse-responses-messages-n.txt", "## /v1/messages stream")
        return [*events[:3], CUT] if "cut" in body["messages"][-1]["content"] else events
    usage = {"input_tokens": 17, "output_tokens": 2}
    message = {"id": "m-1", "type": "message", "role": "assistant", "model": "tiny", "stop_reason": "end_turn"}
    return Answer({**message, "content": [{"type": "text", "text": "the bank"}], "usage": usage})


@pytest.fixture(scope="module")
def replica() -> Iterator[ScriptedReplica]:
    scripts = {
        CHAT: chat_script,
        "/v1/completions": completions_script,
        "/v1/responses": responses_script,
        "/v1/messages": messages_script,
        "/v1/messages/count_tokens": lambda body: Answer({"input_tokens": 17}),
    }
    with scripted_replica(scripts) as running:
        yield running


@pytest.fixture(scope="module")
def front(replica: ScriptedReplica, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway([replica.url], tmp_path_factory.mktemp("front"), config=TENANTS) as running:
        yield running


def openai_client(front: Gateway, key: str = KEY, retries: int = 0, sent: list[str] | None = None) -> openai.OpenAI:
    """`sent` gets the path of everything that the client really sent, its own retries included."""
    counted = None
    if sent is not None:
        counted = openai.DefaultHttpxClient(event_hooks={"request": [lambda r: sent.append(r.url.path)]})
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key=key, max_retries=retries, http_client=counted)


def anthropic_client(front: Gateway, key: str = KEY) -> anthropic.Anthropic:
    # vLLM and the gateway know Bearer tokens; the client calls that an auth token
    return anthropic.Anthropic(base_url=front.url, auth_token=key, max_retries=0)


# -- answers -----------------------------------------------------------------------------------------------------------


def test_chat(front: Gateway) -> None:
    with openai_client(front) as client:
        whole = client.chat.completions.create(model="tiny", messages=ASK)
        assert whole.choices[0].message.content == "the bank"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 2
        chunks = list(client.chat.completions.create(model="tiny", messages=ASK, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "the bank"
        assert [c.usage for c in chunks] == [None] * 3


def test_chat_with_usage(front: Gateway) -> None:
    with openai_client(front) as client:
        options: Any = {"include_usage": True}
        *_, last = client.chat.completions.create(model="tiny", messages=ASK, stream=True, stream_options=options)
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 2


def test_tool_calls(front: Gateway) -> None:
    with openai_client(front) as client:
        whole = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
        calls: Any = whole.choices[0].message.tool_calls
        assert (calls[0].function.name, calls[0].function.arguments) == ("find_river", '{"name": "Po"}')
        with client.chat.completions.stream(model="tiny", messages=ASK, tools=TOOLS) as stream:
            final: Any = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls[0].id == "call-1"
        assert final.message.tool_calls[0].function.arguments == '{"name": "Po"}'


def test_completions(front: Gateway) -> None:
    with openai_client(front) as client:
        whole = client.completions.create(model="tiny", prompt="where")
        assert whole.choices[0].text == "the bank"
        chunks = list(client.completions.create(model="tiny", prompt="where", stream=True))
        assert chunks[-1].choices[0].finish_reason == "length"


def test_responses(front: Gateway) -> None:
    with openai_client(front) as client:
        assert client.responses.create(model="tiny", input="where is the river").output_text == "kOuruick"
        events = list(client.responses.create(model="tiny", input="where is the river", stream=True))
        assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "kOuruick"


def test_messages(front: Gateway) -> None:
    with anthropic_client(front) as client:
        whole = client.messages.create(model="tiny", max_tokens=8, messages=ASK)
        assert whole.content[0].type == "text"
        assert whole.content[0].text == "the bank"
        with client.messages.stream(model="tiny", max_tokens=8, messages=ASK) as stream:
            assert "".join(stream.text_stream) == "fterven()"
            assert stream.get_final_message().usage.output_tokens == 3
        assert client.messages.count_tokens(model="tiny", messages=ASK).input_tokens == 17


def test_models(front: Gateway) -> None:
    with openai_client(front) as client:
        assert [m.id for m in client.models.list()] == ["tiny"]


# -- errors ------------------------------------------------------------------------------------------------------------


def test_error_classes_of_openai(front: Gateway) -> None:
    with openai_client(front) as client:
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            client.chat.completions.create(model="no-such-model", messages=ASK)
        with pytest.raises(openai.BadRequestError, match="temperature must be non-negative") as caught:
            client.chat.completions.create(model="tiny", messages=ASK, temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):  # a model that generates has no embeddings: vLLM's own 404
            client.embeddings.create(model="tiny", input="where")
    with openai_client(front, key="wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model="tiny", messages=ASK)
    batch = {"x-service-class": "batch"}
    with openai_client(front, GUEST_KEY) as guest, pytest.raises(openai.PermissionDeniedError):
        guest.chat.completions.create(model="tiny", messages=ASK, extra_headers=batch)


def test_error_classes_of_anthropic(front: Gateway) -> None:
    with anthropic_client(front) as client, pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="no-such-model", max_tokens=8, messages=ASK)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    with anthropic_client(front, "wrong") as stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="tiny", max_tokens=8, messages=ASK)


def test_a_stream_cut_upstream_raises_in_the_client(front: Gateway) -> None:
    cut: list[Any] = [{"role": "user", "content": "cut"}]
    with openai_client(front) as client, pytest.raises(openai.APIError):
        list(client.chat.completions.create(model="tiny", messages=cut, stream=True))
    with (
        anthropic_client(front) as claude,
        claude.messages.stream(model="tiny", max_tokens=8, messages=cut) as stream,
        pytest.raises(anthropic.APIStatusError),
    ):
        list(stream)


def test_over_quota_says_when_and_the_client_comes_back_then(front: Gateway) -> None:
    sent: list[str] = []
    with openai_client(front, GUEST_KEY, retries=3, sent=sent) as guest:
        for _ in range(3):  # two a second, one at once: some have to wait for their turn
            guest.chat.completions.create(model="tiny", messages=ASK)
    assert len(sent) > 3

    def hurry() -> None:
        with openai_client(front, GUEST_KEY) as hasty:
            for _ in range(3):
                hasty.chat.completions.create(model="tiny", messages=ASK)

    with pytest.raises(openai.RateLimitError) as caught:
        hurry()
    assert caught.value.code == "over_quota"
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_no_replica_is_a_server_error_for_both(tmp_path: Path) -> None:
    config = '[[replicas]]\nurl = "http://127.0.0.1:1"\nmodels = ["tiny"]\n'  # nobody listens on port 1
    with gateway([], tmp_path, config=config, ready=False) as front:
        with openai_client(front) as client, pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(model="tiny", messages=ASK)
        assert refused.value.status_code in (502, 503)
        with anthropic_client(front) as claude, pytest.raises(anthropic.InternalServerError) as overloaded:
            claude.messages.create(model="tiny", max_tokens=8, messages=ASK)
        assert overloaded.value.status_code in (502, 503)
