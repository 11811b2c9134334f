"""The official clients, unchanged, against real vLLM behind the gateway."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.serving import Gateway
from tests.vllm.replicas import Replicas

TOOL = {
    "type": "function",
    "function": {
        "name": "find_river",
        "description": "Where a river is",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
ASK = [{"role": "user", "content": "where is the river"}]


@pytest.fixture
def client(front: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture
def claude(front: Gateway) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=front.url, api_key="unused", max_retries=0, timeout=120) as made:
        yield made


def test_openai_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=8, temperature=0)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    pieces = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(pieces)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_openai_chat_with_a_forced_tool_call(client: openai.OpenAI, breakable: Replicas) -> None:
    """The name is forced, the arguments come from random weights: up to the token limit they are any beginning of a
    JSON text, so all that can be said is that there are some. Needs the tool parser that ours start with."""
    forced = {"type": "function", "function": {"name": "find_river"}}
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=ASK, max_tokens=64, tools=[TOOL], tool_choice=forced, stream=True, temperature=0
        )
    )
    calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or ()]
    assert calls[0].function is not None
    assert calls[0].function.name == "find_river"
    assert "".join(call.function.arguments or "" for call in calls if call.function)


def test_openai_completions_and_responses(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="where is", max_tokens=8, temperature=0)
    streamed = client.completions.create(model="tiny", prompt="where is", max_tokens=8, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in streamed if c.choices) == whole.choices[0].text
    answer = client.responses.create(model="tiny", input="where is the river", max_output_tokens=16, temperature=0)
    events = list(
        client.responses.create(
            model="tiny", input="where is the river", max_output_tokens=16, temperature=0, stream=True
        )
    )
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text


def test_openai_models_and_errors(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=ASK)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=ASK, temperature=-5)


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(model="tiny", messages=ASK, max_tokens=8, extra_body={"temperature": 0})
    assert whole.usage.output_tokens == 8
    with claude.messages.stream(model="tiny", messages=ASK, max_tokens=8, extra_body={"temperature": 0}) as streamed:
        text = "".join(streamed.text_stream)
        final = streamed.get_final_message()
    assert [block.text for block in whole.content if block.type == "text"] == [text]
    assert final.usage.output_tokens == 8
    assert final.stop_reason == "max_tokens"


def test_anthropic_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="no-such-model", messages=ASK, max_tokens=8)
    assert claude.messages.count_tokens(model="tiny", messages=ASK).input_tokens > 0
