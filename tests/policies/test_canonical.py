"""What makes two requests the same prompt to a template, and what does not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.canonical import MOST_FIELDS, FieldAt, canonical_parts, cut, field_at
from policies.prefix import chain

LONG = "You are a careful assistant. " * 40


def stream(body: dict[str, Any] | bytes, api: str = "chat", adapter: str | None = None) -> bytes:
    parsed = orjson.loads(body) if isinstance(body, bytes) else body
    return b"".join(canonical_parts(api, parsed, adapter=adapter))


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **more}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_the_stream_is_fields_each_followed_by_its_tag() -> None:
    assert stream(chat(user("hi"))) == (
        b"m\xffM\x00\x00\x00\x01" + b"user\xffR\x00\x00\x00\x04" + b"hi\xffT\x00\x00\x00\x02"
    )


@pytest.mark.parametrize(
    "spelling",
    [
        b'{"model":"m","messages":[{"role":"user","content":"caf\xc3\xa9"}]}',
        b'{ "messages" : [ { "content" : "caf\\u00e9" , "role" : "user" } ] , "model" : "m" }',
        b'{"model":"m","temperature":0.2,"max_tokens":5,"stream":true,"user":"u-17","messages":[{"role":"user","content":"caf\\u00E9"}]}',
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"caf\xc3\xa9"}]}]}',
        b'{"model":"m","messages":[{"role":"user","content":"caf\xc3\xa9","name":null}]}',
    ],
)
def test_json_spelling_key_order_and_sampling_fields_do_not_matter(spelling: bytes) -> None:
    assert stream(spelling) == stream(chat(user("café")))


@pytest.mark.parametrize(
    "other",
    [
        {**chat(user("hi")), "model": "n"},
        chat(user("hi"), cache_salt="s"),
        chat({"role": "system", "content": "hi"}),
        chat(user("hi "),),
        chat(user([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}])),
        chat(user("h"), user("i")),
        chat({"role": "user", "content": "hi", "name": "bob"}),
        chat(user("hi"), chat_template_kwargs={"enable_thinking": False}),
        chat(user("hi"), tools=[{"type": "function", "function": {"name": "f"}}]),
    ],
)  # fmt: skip
def test_what_the_template_would_render_differently_differs(other: dict[str, Any]) -> None:
    assert stream(other) != stream(chat(user("hi")))


def test_an_adapter_has_its_own_prefixes() -> None:
    assert stream(chat(user("hi")), adapter="a") != stream(chat(user("hi")))


def test_the_order_of_tools_and_of_keys_in_their_schema_matters() -> None:
    f, g = {"name": "f", "parameters": {"a": 1, "b": 2}}, {"name": "g"}
    turned = {"name": "f", "parameters": {"b": 2, "a": 1}}
    streams = {stream(chat(user("x"), tools=tools)) for tools in ([f, g], [g, f], [turned, g])}
    assert len(streams) == 3


def test_the_next_turn_extends_the_stream_byte_for_byte() -> None:
    first = chat({"role": "system", "content": LONG}, user("first question"))
    answer = {"role": "assistant", "content": "an answer", "refusal": None, "tool_calls": []}
    second = chat(*first["messages"], answer, user("second question"), temperature=1)
    assert stream(second).startswith(stream(first))
    assert chain([stream(second)])[: len(chain([stream(first)]))] == chain([stream(first)])


def test_two_prompts_that_only_end_differently_share_their_beginning() -> None:
    # a length in front of the text would part them at the first byte
    short, long = stream(chat(user(LONG + "why?"))), stream(chat(user(LONG + "and how many of them?")))
    shared = len(chain([LONG.encode()]))
    assert shared == 4
    assert chain([short])[:shared] == chain([long])[:shared]


def test_completions_prompts_by_text_or_by_token_ids() -> None:
    def prompt(value: Any) -> bytes:
        return stream({"model": "m", "prompt": value}, "completions")

    assert prompt("hello") == prompt(["hello"])
    assert prompt([1, 2, 258]) == prompt([[1, 2, 258]])
    assert prompt([1, 2, 258]) == b"m\xffM\0\0\0\1" + b"\0\0\0\1" + b"\0\0\0\2" + b"\0\0\1\2" + b"\xffI\0\0\0\x0c"
    assert prompt(["a", "b"]) != prompt("ab")


def test_a_chat_through_the_responses_or_messages_api_is_the_same_conversation() -> None:
    wanted = stream(chat({"role": "system", "content": "be brief"}, user("hi")))
    assert stream({"model": "m", "instructions": "be brief", "input": "hi"}, "responses") == wanted
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    assert stream({"model": "m", "instructions": "be brief", "input": items}, "responses") == wanted
    assert stream({"model": "m", "system": "be brief", "messages": [user("hi")], "max_tokens": 9}, "messages") == wanted


def test_the_cache_control_mark_that_wanders_with_each_turn_does_not_matter() -> None:
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    tool = {"name": "f", "input_schema": {}}
    with_marks = {"model": "m", "messages": [user([marked])], "tools": [{**tool, "cache_control": {}}]}
    without = {"model": "m", "messages": [user("hi")], "tools": [tool]}
    assert stream(with_marks, "messages") == stream(without, "messages")


def test_media_count_by_digest() -> None:
    def image(url: str) -> bytes:
        return stream(chat(user([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}])))

    assert image("data:image/png;base64," + "A" * 100_000) != image("data:image/png;base64," + "B" * 100_000)
    assert len(image("data:image/png;base64," + "A" * 100_000)) < 200


def test_tool_calls_and_results_are_part_of_the_conversation() -> None:
    def call(arguments: str) -> bytes:
        made = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return stream(chat(user("x"), {"role": "assistant", "content": None, "tool_calls": [made]}))

    assert call('{"a": 1}') != call('{"a": 2}')
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "42"}]}
    assert b"42\xffT" in stream({"model": "m", "messages": [user([result])]}, "messages")


def test_an_offset_is_explained_without_showing_text() -> None:
    parts = canonical_parts("chat", chat({"role": "system", "content": "be brief"}, user("hi there")))
    whole = b"".join(parts)
    assert field_at(parts, 0) == FieldAt("model", -1, 0)
    assert field_at(parts, whole.index(b"brief")) == FieldAt("text", 0, 3)
    assert field_at(parts, whole.index(b"there")) == FieldAt("text", 1, 3)
    assert field_at(parts, len(whole)) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["chat", "completions", "responses", "messages", "pool"]), json_values, json_values)
def test_no_body_however_malformed_raises(api: str, inner: Any, other: Any) -> None:
    keys = ("messages", "prompt", "input", "tools", "system", "instructions", "model", "cache_salt")
    for value in (inner, [inner], [{"role": other, "content": inner}], [{"content": [inner, {"type": other}]}]):
        canonical_parts(api, dict.fromkeys(keys, value))


DEEP = orjson.loads(b"[" * 1000 + b"]" * 1000)


@pytest.mark.parametrize(
    ("api", "body", "stands"),
    [
        (
            "chat",
            {"messages": [{"role": "user", "content": DEEP, "name": DEEP}], "tools": DEEP, "cache_salt": DEEP},
            b"deep",
        ),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": DEEP}]}]}, b"\xffD"),
        ("completions", {"prompt": DEEP}, b"deep"),
        ("responses", {"input": DEEP}, b"deep"),
        ("messages", {"system": DEEP, "messages": DEEP}, b"deep"),
    ],
)
def test_json_deeper_than_it_can_be_written_again_does_not_raise(api: str, body: dict[str, Any], stands: bytes) -> None:
    assert stands in stream(body, api)


def test_a_result_inside_a_result_is_no_deeper_than_one() -> None:
    content: Any = "42"
    for _ in range(400):
        content = [{"type": "tool_result", "tool_use_id": "c1", "content": content}]
    assert b"tool_result=c1" in stream({"messages": [user(content)]}, "messages")


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("completions", {"prompt": [[1]] * 100_000}),
        ("chat", {"messages": [user("a")] * 100_000}),
        ("chat", {"messages": [user([{"type": "text", "text": "a"}] * 100_000)]}),
    ],
)
def test_what_is_beyond_the_most_fields_is_not_read(api: str, body: dict[str, Any]) -> None:
    parts = canonical_parts(api, body)
    assert cut(parts)
    assert 2 * MOST_FIELDS <= len(parts) <= 4 * MOST_FIELDS + 2  # a message has two fields, a field its bytes and tag
    assert len(chain(parts)) == 512
    assert not cut(canonical_parts("completions", {"prompt": [1] * 100_000}))


texts = st.text(max_size=12)
conversations = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), texts), min_size=1, max_size=4)


@given(conversations, conversations)
def test_equal_streams_mean_equal_conversations(one: list[tuple[str, str]], two: list[tuple[str, str]]) -> None:
    def told(messages: list[tuple[str, str]]) -> bytes:
        return stream(chat(*({"role": role, "content": text} for role, text in messages)))

    assert (told(one) == told(two)) == (one == two)


def test_token_ids_are_four_bytes_each_whatever_number_is_sent() -> None:
    def of(tokens: list[int]) -> bytes:
        return b"".join(canonical_parts("completions", {"prompt": tokens}, model="m", adapter=None))

    assert bytes.fromhex("00000001 00030d40 80000000 ffffffff") in of([1, 200_000, 2**31, 2**32 - 1])
    assert bytes.fromhex("fffffffb 00000002 ffffffff") in of([-5, 2**32 + 2, 2**64 - 1])
