"""JSON paths of the fields of the canonical stream."""

from __future__ import annotations

from typing import Any

import pytest

from policies.canonical import canonical_parts
from policies.places import path

TOOL = {"type": "function"}
CHAT = {
    "model": "m", "cache_salt": "s", "documents": [1], "tools": [TOOL],
    "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [
        {"type": "text", "text": "b"}, {"type": "image_url", "image_url": {"url": "x"}}]}],
}  # fmt: skip
CLAUDE = {"model": "m", "system": [{"type": "text", "text": "a"}], "messages": [{"role": "user", "content": "b"}]}
RESPONSES = {"model": "m", "instructions": "a", "input": [{"role": "user", "content": "b"}, {"type": "reasoning"}]}


@pytest.mark.parametrize(
    ("api", "body", "paths"),
    [
        ("chat", CHAT, [
            "model", "cache_salt", "documents", "tools", "messages[0].role", "messages[0].content",
            "messages[1].role", "messages[1].content[0]", "messages[1].content[1]"]),
        ("messages", CLAUDE, ["model", "system", "system[0]", "messages[0].role", "messages[0].content"]),
        ("responses", RESPONSES, [
            "model", "instructions", "instructions", "input[0].role", "input[0].content", "input[1].role"]),
        ("responses", {"model": "m", "input": "b"}, ["model", "input", "input"]),
        ("completions", {"model": "m", "prompt": "b"}, ["model", "prompt"]),
        ("completions", {"model": "m", "prompt": ["a", "b"]}, ["model", "prompt[0]", "prompt[1]"]),
        ("completions", {"model": "m", "prompt": [1, 2]}, ["model", "prompt"]),
    ],
    ids=["chat", "messages", "responses", "input", "prompt", "prompts", "ids"],
)  # fmt: skip
def test_each_field_has_its_path(api: str, body: dict[str, Any], paths: list[str]) -> None:
    parts = canonical_parts(api, body)
    assert [path(api, body, parts, n) for n in range(len(parts) // 2)] == paths


def test_a_tool_is_named_by_its_number() -> None:
    assert path("chat", CHAT, canonical_parts("chat", CHAT), 3, 2) == "tools[2]"
