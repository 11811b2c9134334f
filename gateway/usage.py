"""Tokens as replicas report them, in each API's spelling, and the splice that asks for them.

Asking: `stream_options.include_usage` is written into the received bytes; nothing else of the body changes, so that
what the engine sees is what the client wrote (re-serialising loses number spellings, duplicate keys and order).
Where `stream_options` exists its place is found by walking the top level of the JSON text; last duplicate wins, as in
the engine's parser. A `stream_options` that is no object is left alone: the replica refuses it with the true message.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from policies.model import Usage

_ASK = b'"stream_options":{"include_usage":true},'
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s"{}\[\]:,]+', re.DOTALL)


def read(usage: Any) -> Usage | None:
    """Usage from an OpenAI, Responses or Anthropic `usage` object; None for anything else."""
    if type(usage) is not dict:
        return None
    if "prompt_tokens" in usage or "completion_tokens" in usage:
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if type(details) is dict else None
        return Usage(
            prompt if type(prompt) is int else None,
            completion if type(completion) is int else None,
            cached if type(cached) is int else None,
        )
    details = usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else usage.get("cache_read_input_tokens")
    return Usage(_count(usage.get("input_tokens")), _count(usage.get("output_tokens")), _count(cached))


def merge(old: Usage | None, new: Usage | None) -> Usage | None:
    """The newer value of each field where it has one: Anthropic splits usage over two events."""
    if old is None or new is None:
        return new or old
    return Usage(
        old.prompt_tokens if new.prompt_tokens is None else new.prompt_tokens,
        old.completion_tokens if new.completion_tokens is None else new.completion_tokens,
        old.cached_tokens if new.cached_tokens is None else new.cached_tokens,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def ask(body: bytes, options: Any, present: bool) -> list[bytes | memoryview] | None:
    """The body in parts that, joined, ask for usage; None where nothing should change.

    `options` is the parsed `stream_options`, `present` whether the key exists. The large part is not copied.
    """
    if not present:
        at = body.index(b"{") + 1
        return _insert(body, at, _ASK, at)
    if options is not None and not isinstance(options, dict):
        return None
    if options is not None and options.get("include_usage") is True:
        return None
    span = _value_span(body, 0, "stream_options")
    if span is None:
        return None
    if options is None:
        return _insert(body, span[0], b'{"include_usage":true}', span[1])
    inner = _value_span(body, span[0], "include_usage")
    if inner is not None:
        return _insert(body, inner[0], b"true", inner[1])
    separator = b"," if options else b""
    return _insert(body, span[0] + 1, b'"include_usage":true' + separator, span[0] + 1)


def _insert(body: bytes, at: int, text: bytes, until: int) -> list[bytes | memoryview]:
    if len(body) < 65536:
        return [body[:at] + text + body[until:]]
    view = memoryview(body)
    return [view[:at], text, view[until:]]


def _value_span(body: bytes, start: int, key: str) -> tuple[int, int] | None:
    """Where the value of the last `key` of the object that begins at or after `start` stands in the text."""
    depth = 0
    found: tuple[int, int] | None = None
    name: bytes | None = None  # string at depth 1 that may turn out to be a key
    value_from: int | None = None
    last_end = 0
    for match in _TOKEN.finditer(body, start):
        text = match[0]
        if text in (b"{", b"["):
            if value_from == -1:
                value_from = match.start()
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return (value_from, last_end) if value_from is not None and value_from >= 0 else found
        elif depth == 1 and text == b",":
            if value_from is not None and value_from >= 0:
                found = (value_from, last_end)
            name, value_from = None, None
        elif depth == 1 and text == b":" and value_from is None:
            if name is not None and orjson.loads(name) == key:
                value_from = -1
        elif depth == 1:
            if value_from == -1:
                value_from = match.start()
            elif text.startswith(b'"'):
                name = text
        last_end = match.end()
    return found
