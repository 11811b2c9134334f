"""Tokens as replicas report them, in each API's spelling, and the splice that asks for them.

Asking: `stream_options.include_usage` is written into the received bytes; nothing else of the body changes, so that
what the engine sees is what the client wrote (re-serialising loses number spellings, duplicate keys and order).
Where `stream_options` exists its name is searched from the end (last duplicate wins, as in the engine's parser) and the
result is parsed once more: only a splice that gave the top level what was wanted is sent. What is spelled so that it is
not found (in escapes, longer than `MOST_BYTES`) goes as it came, without usage: walking a body of megabytes token by
token would hold up every stream for seconds. One that is no object is left to the replica, which refuses it itself.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from policies.model import Usage

MOST_TOKENS = 2**31  # a count beyond is no count: learnt from, it would spoil every estimate
MOST_BYTES = 4096  # of a `stream_options` that is changed
MOST_PLACES = 3  # where the name stands in the text; each try costs a parse of the body
_ASK = b'"stream_options":{"include_usage":true},'
_NAME = b'"stream_options"'
_COLON = re.compile(rb"\s*:\s*")
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]|[^\s"{}\[\]:,]+', re.DOTALL)


def read(usage: Any) -> Usage | None:
    """Usage from an OpenAI, Responses or Anthropic `usage` object; None for anything else."""
    if type(usage) is not dict:
        return None
    if "prompt_tokens" in usage or "completion_tokens" in usage:
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if type(details) is dict else None
        return Usage(
            prompt if type(prompt) is int and 0 <= prompt <= MOST_TOKENS else None,
            completion if type(completion) is int and 0 <= completion <= MOST_TOKENS else None,
            cached if type(cached) is int and 0 <= cached <= MOST_TOKENS else None,
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
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


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
    wanted = {**(options or {}), "include_usage": True}
    at = len(body)
    for _ in range(MOST_PLACES):
        at = body.rfind(_NAME, 0, at)
        if at < 0:
            return None
        colon = _COLON.match(body, at + len(_NAME))
        if colon is None:
            continue
        parts = _with_usage(body, colon.end(), options)
        if parts is not None and _gives(parts, wanted):
            return parts
    return None


def _with_usage(body: bytes, at: int, options: dict[str, Any] | None) -> list[bytes | memoryview] | None:
    """The body with usage asked for in the value that begins at `at`, if that is what `options` was read from."""
    if options is None:
        return _insert(body, at, b'{"include_usage":true}', at + 4) if body.startswith(b"null", at) else None
    if not body.startswith(b"{", at):
        return None
    known, inner = _value_span(body[at : at + MOST_BYTES], "include_usage")
    if not known:
        return None
    if inner is not None:
        return _insert(body, at + inner[0], b"true", at + inner[1])
    return _insert(body, at + 1, b'"include_usage":true' + (b"," if options else b""), at + 1)


def _gives(parts: list[bytes | memoryview], wanted: dict[str, Any]) -> bool:
    """Whether the body in `parts` has these `stream_options`; RecursionError: they are too deep to compare."""
    try:
        return bool(orjson.loads(b"".join(parts)).get("stream_options") == wanted)
    except (orjson.JSONDecodeError, RecursionError):
        return False


def _insert(body: bytes, at: int, text: bytes, until: int) -> list[bytes | memoryview]:
    if len(body) < 65536:
        return [body[:at] + text + body[until:]]
    view = memoryview(body)
    return [view[:at], text, view[until:]]


def _value_span(text: bytes, key: str) -> tuple[bool, tuple[int, int] | None]:
    """Whether the object that `text` begins with ends in it, and where the value of its last `key` stands."""
    depth = 0
    found: tuple[int, int] | None = None
    name: bytes | None = None  # string at depth 1 that may turn out to be a key
    value_from: int | None = None
    last_end = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in (b"{", b"["):
            if value_from == -1:
                value_from = match.start()
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return True, ((value_from, last_end) if value_from is not None and value_from >= 0 else found)
        elif depth == 1 and token == b",":
            if value_from is not None and value_from >= 0:
                found = (value_from, last_end)
            name, value_from = None, None
        elif depth == 1 and token == b":" and value_from is None:
            if name is not None and orjson.loads(name) == key:
                value_from = -1
        elif depth == 1:
            if value_from == -1:
                value_from = match.start()
            elif token.startswith(b'"'):
                name = token
        last_end = match.end()
    return False, None
