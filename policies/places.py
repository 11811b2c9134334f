"""Where a byte of the canonical stream stands in the request, as a JSON path: messages[0].content, tools[2], prompt.

The stream knows fields in template order (`canonical.py`); which key of the body each came from follows from the API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policies.canonical import KINDS

_HEADS = {"messages": "system", "responses": "instructions"}  # what stands before the list of messages


def path(api: str, document: Mapping[str, Any], parts: Sequence[bytes], number: int, tool: int | None = None) -> str:
    """The path of field `number` (from 0); tool: which one of the tools it is about."""
    kind, data = KINDS[parts[2 * number + 1][1]], parts[2 * number]
    if kind == "tools":
        return "tools" if tool is None else f"tools[{tool}]"
    if kind == "option":
        return data.partition(b"=")[0].decode("utf-8", "replace")
    if kind in ("model", "adapter", "cache_salt"):
        return "model" if kind == "adapter" else kind
    before = [KINDS[tag[1]] for tag in parts[1 : 2 * number + 2 : 2]]
    message = before.count("role") - 1
    if message < 0:
        prompt = document.get("prompt")
        several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        head = sum(k in ("model", "adapter", "cache_salt", "option", "tools") for k in before)
        return f"prompt[{number - head}]" if several else "prompt"
    where, holder = _message(api, document, message)
    if kind == "role":
        return where if holder is None or where in _HEADS.values() else f"{where}.role"
    if holder is None:
        return where
    content = holder.get("content")
    if not isinstance(content, list):
        return f"{where}.content"
    last_role = len(before) - 1 - before[::-1].index("role")
    part = min(number - last_role - 1, max(0, len(content) - 1))
    return f"{where}[{part}]" if where in _HEADS.values() else f"{where}.content[{part}]"


def _message(api: str, document: Mapping[str, Any], message: int) -> tuple[str, Mapping[str, Any] | None]:
    """Path of a message of the stream, and the message where it is one of its own."""
    key = "input" if api == "responses" else "messages"
    head = _HEADS.get(api)
    if head is not None and document.get(head) is not None:
        if message == 0:
            system = document[head]
            return head, {"content": system} if isinstance(system, list) else None
        message -= 1
    listed = document.get(key)
    if not isinstance(listed, list):
        return key, None
    found = listed[message] if message < len(listed) else None
    return f"{key}[{message}]", found if isinstance(found, dict) else None
