"""What a whole answer says: tokens, finish reason, the id it can be asked for again.

Only answers of generation are read: `abort` in one of 200 status means that the replica is shutting down and has
answered nothing, or only a part (vLLM does both with a clean 200), so it is a failed attempt. An answer too long to be
collected is passed on as it comes; of it the two ends are read, since the id stands first and usage near the end. The
marks looked for hold bare quotes, which inside a JSON string are escaped, so no text can imitate them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import orjson

from gateway import usage as usages
from gateway.errors import Api
from policies.model import Usage

TAIL_BYTES = 16 * 1024
_RESPONSE_ID = re.compile(rb'\s*\{\s*"id"\s*:\s*"([^"\\]{1,256})"')
_USAGE = re.compile(rb'"usage"\s*:\s*(?=\{)')
_FINE = frozenset({"max_output_tokens", "content_filter"})


@dataclass(slots=True, init=False)
class Reading:
    usage: Usage | None
    aborted: bool
    response_id: str

    def __init__(
        self,
        usage: Usage | None = None,
        aborted: bool = False,
        response_id: str = "",
    ) -> None:
        self.usage = usage
        self.aborted = aborted
        self.response_id = response_id


class Long:
    """The two ends of an answer that is passed on as it comes."""

    __slots__ = ("_api", "_tail", "response_id")

    def __init__(self, api: Api, begun: bytes) -> None:
        self._api = api
        found = _RESPONSE_ID.match(begun) if api is Api.RESPONSES else None
        self.response_id = "" if found is None else found[1].decode("utf-8", "replace")
        self._tail = begun[-TAIL_BYTES:]

    def add(self, payload: bytes) -> None:
        self._tail = (self._tail + payload[-TAIL_BYTES:])[-TAIL_BYTES:]

    def usage(self) -> Usage | None:
        """Of the last usage object in the tail; None where there is none whole, or the API generates nothing."""
        marks = list(_USAGE.finditer(self._tail)) if self._api is not Api.OTHER else []
        if not marks:
            return None
        try:
            document, _ = json.JSONDecoder().raw_decode(self._tail[marks[-1].end() :].decode("utf-8", "replace"))
        except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, lists a thousand deep
            return None
        return usages.read(document)


def read(api: Api, body: bytes) -> Reading:
    """Never raises: an answer that is no JSON passes as it is."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return Reading()
    if type(document) is not dict:
        return Reading()
    return Reading(usages.read(document.get("usage")), _aborted(api, document), _id(api, document))


def _aborted(api: Api, document: dict[str, Any]) -> bool:
    if api is Api.MESSAGES:
        return document.get("stop_reason") == "abort"
    if api is Api.RESPONSES:
        details = document.get("incomplete_details")
        reason = details.get("reason") if type(details) is dict else None
        ended = document.get("status") in ("cancelled", "incomplete")
        return ended and isinstance(reason, str) and reason not in _FINE
    choices = document.get("choices")
    if type(choices) is list:
        for choice in choices:
            if type(choice) is dict and choice.get("finish_reason") in ("abort", "error"):
                return True
    return False


def _id(api: Api, document: dict[str, Any]) -> str:
    value = document.get("id") if api is Api.RESPONSES else None
    return value if isinstance(value, str) else ""
