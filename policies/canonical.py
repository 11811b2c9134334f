"""The canonical stream of a request: what the engine's template will render, in its order, spelling removed.

Head (model, adapter, cache_salt, template options), tools, then role and content of each message. A field is its
bytes followed by a tag: 0xff, one letter, its length in four bytes. Text is UTF-8 and never contains 0xff, token
ids are four bytes below 0x80000000, so no two requests can be confused; the tag stands *behind* the field because a
length in front would part two prompts that only end differently. A next turn (same messages, answer, new message)
extends the stream. JSON spelling, the order of envelope and message keys and Anthropic's cache_control do not
matter; the order of tools and of the keys inside them does, since templates print them as given. Media count by
digest: few bytes for many tokens, so their part of a hit is underestimated. After `MOST_FIELDS` fields the stream ends,
far beyond what `chain` reads, so that a body of a million tiny lists costs no more; JSON too deep to write is one word.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import orjson
from xxhash import xxh3_128_digest

MOST_FIELDS = 32_768  # their tags alone are longer than what `prefix.chain` hashes
_DEEP = b"deep"
_MOST_ID = 0xFFFFFFFF
_LOW_FIRST = array("I", [1]).tobytes()[0] == 1  # the order in which this machine keeps the bytes of a number
_TAG = Struct(">BBI").pack
_MODEL, _ADAPTER, _SALT, _OPTION, _TOOLS, _ROLE, _TEXT, _OTHER, _MEDIA, _IDS = b"MASOLRTXDI"
KINDS = {
    _MODEL: "model", _ADAPTER: "adapter", _SALT: "cache_salt", _OPTION: "option", _TOOLS: "tools",
    _ROLE: "role", _TEXT: "text", _OTHER: "other", _MEDIA: "media", _IDS: "token_ids",
}  # fmt: skip
_OPTIONS = ("chat_template", "chat_template_kwargs", "documents", "reasoning_effort")  # vLLM's template sees these
_SORTED = orjson.OPT_SORT_KEYS
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_MESSAGE_KEYS = frozenset({"role", "content", "cache_control", "type", "id", "status"})


class _FullError(Exception):
    """The stream has as many fields as it may have."""


@dataclass(slots=True, frozen=True)
class FieldAt:
    """Where an offset of the stream lies: the kind of field, the message's number (-1: the head), the offset in it."""

    kind: str
    message: int
    offset: int


def canonical_parts(
    api: str, body: Mapping[str, Any], *, model: str | None = None, adapter: str | None = None
) -> list[bytes]:
    """Fields and tags in stream order; `chain` joins and hashes them. Never raises on a malformed body.

    api: chat | completions | responses | messages; anything else has a head only. body: as orjson parsed it.
    model: the name to route by where it is not the body's own (an alias); adapter: the LoRA adapter's name.
    """
    parts: list[bytes] = []
    try:
        _stream(parts, api, body, model, adapter)
    except _FullError:
        return parts
    return parts


def cut(parts: Sequence[bytes]) -> bool:
    """Whether the stream ended at `MOST_FIELDS` and not with the prompt: its length then says nothing."""
    return len(parts) >= 2 * MOST_FIELDS


def _stream(parts: list[bytes], api: str, body: Mapping[str, Any], model: str | None, adapter: str | None) -> None:
    _field(parts, _MODEL, _bytes(body.get("model") if model is None else model))
    if adapter is not None:
        _field(parts, _ADAPTER, _bytes(adapter))
    if (salt := body.get("cache_salt")) is not None:
        _field(parts, _SALT, _bytes(salt))
    for option in _OPTIONS:
        if (value := body.get(option)) is not None:
            _field(parts, _OPTION, option.encode() + b"=" + _bytes(value))
    if tools := body.get("tools"):
        _field(parts, _TOOLS, _json(_uncached(tools)))
    if api == "chat":
        _messages(parts, body.get("messages"))
    elif api == "completions":
        _prompt(parts, body.get("prompt"))
    elif api == "messages":
        if (system := body.get("system")) is not None:
            _message(parts, {"role": "system", "content": system})
        _messages(parts, body.get("messages"))
    elif api == "responses":
        if (instructions := body.get("instructions")) is not None:
            _message(parts, {"role": "system", "content": instructions})
        given = body.get("input")
        _messages(parts, [{"role": "user", "content": given}] if isinstance(given, str) else given)


def field_at(parts: Sequence[bytes], offset: int) -> FieldAt | None:
    """The field that the stream's byte at `offset` belongs to; None beyond the end. Tags belong to their field."""
    message, at = -1, 0
    for data, tag in zip(parts[::2], parts[1::2], strict=True):
        if tag[1] == _ROLE:
            message += 1
        if offset < at + len(data) + len(tag):
            return FieldAt(KINDS[tag[1]], message, offset - at)
        at += len(data) + len(tag)
    return None


def _field(parts: list[bytes], kind: int, data: bytes) -> None:
    if len(parts) >= 2 * MOST_FIELDS:
        raise _FullError
    parts.append(data)
    parts.append(_TAG(0xFF, kind, len(data)))


def _bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return b"" if value is None else _json(value, _SORTED)


def _json(value: Any, option: int = 0) -> bytes:
    """orjson reads 1024 levels and writes 254; what lies between is legal, if no prompt anybody means."""
    try:
        return orjson.dumps(value, option=option)
    except orjson.JSONEncodeError:
        return _DEEP


def _messages(parts: list[bytes], messages: Any) -> None:
    if isinstance(messages, list):
        for message in messages if len(messages) <= MOST_FIELDS else messages[:MOST_FIELDS]:
            _message(parts, message)
    elif messages is not None:
        _field(parts, _OTHER, _bytes(messages))


def _message(parts: list[bytes], message: Any) -> None:
    if not isinstance(message, dict):
        _field(parts, _OTHER, _bytes(message))
        return
    role, content = message.get("role"), message.get("content")
    if type(role) is str and type(content) is str and len(message) == 2:  # the usual one
        said, text = role.encode("utf-8", "surrogatepass"), content.encode("utf-8", "surrogatepass")
        parts += (said, _TAG(0xFF, _ROLE, len(said)), text, _TAG(0xFF, _TEXT, len(text)))
        return
    # an item of the responses API without a role (function_call, reasoning, ...) is known by its type
    _field(parts, _ROLE, _bytes(role if role is not None else message.get("type")))
    if isinstance(content, str):
        _field(parts, _TEXT, content.encode("utf-8", "surrogatepass"))
    elif isinstance(content, list):
        for part in content:
            _part(parts, part)
    elif content is not None:
        _field(parts, _OTHER, _bytes(content))
    if len(message) > 2:
        rest = {k: v for k, v in message.items() if k not in _MESSAGE_KEYS and v is not None and v != []}
        for key in sorted(rest):
            _field(parts, _OTHER, key.encode("utf-8", "surrogatepass") + b"=" + _given(rest[key]))


def _part(parts: list[bytes], part: Any, inside: bool = False) -> None:
    if isinstance(part, str):
        _field(parts, _TEXT, _bytes(part))
        return
    if not isinstance(part, dict):
        _field(parts, _OTHER, _bytes(part))
        return
    kind = part.get("type")
    text = part.get("text")
    if isinstance(text, str) and (kind is None or (isinstance(kind, str) and kind in _TEXT_TYPES)):
        _field(parts, _TEXT, text.encode("utf-8", "surrogatepass"))
    elif kind == "tool_result" and not inside:  # a result holds text and media, never another result
        _field(parts, _OTHER, b"tool_result=" + _bytes(part.get("tool_use_id")))
        content = part.get("content")
        for inner in content if isinstance(content, list) else [content]:
            _part(parts, inner, True)
    elif kind == "tool_use":
        _field(parts, _OTHER, _given([part.get("id"), part.get("name"), part.get("input")]))
    else:
        stripped = {k: v for k, v in part.items() if k != "cache_control"}
        _field(parts, _MEDIA, xxh3_128_digest(_json(stripped, _SORTED)).hex().encode())


def _prompt(parts: list[bytes], prompt: Any, inside: bool = False) -> None:
    if isinstance(prompt, str):
        _field(parts, _TEXT, _bytes(prompt))
    elif isinstance(prompt, list) and set(map(type, prompt)) == {int}:
        _field(parts, _IDS, _ids(prompt))
    elif isinstance(prompt, list) and not inside:  # several prompts; no API nests deeper
        for one in prompt:
            _prompt(parts, one, True)
    elif prompt is not None:
        _field(parts, _OTHER, _bytes(prompt))


def _ids(tokens: Sequence[int]) -> bytes:
    """Four bytes each, the highest first. An array packs millions of them in a fifth of the time that struct takes."""
    try:
        packed = array("I", tokens)
    except OverflowError:  # no vocabulary has such ids
        packed = array("I", [token & _MOST_ID for token in tokens])
    if _LOW_FIRST:
        packed.byteswap()
    return packed.tobytes()


def _given(value: Any) -> bytes:
    """JSON with keys in the order given: templates print tool calls as they came."""
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else _json(value)


def _uncached(tools: Any) -> Any:
    """Anthropic clients mark the last tool with cache_control; the template never sees it."""
    if isinstance(tools, list) and any(isinstance(tool, dict) and "cache_control" in tool for tool in tools):
        return [
            {k: v for k, v in tool.items() if k != "cache_control"} if isinstance(tool, dict) else tool
            for tool in tools
        ]
    return tools
