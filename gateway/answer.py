"""What a whole answer says: tokens, finish reason, the id it can be asked for again.

Only answers of generation are read: `abort` in one of 200 status means that the replica is shutting down and has
answered nothing, or only a part (vLLM does both with a clean 200), so it is a failed attempt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from gateway import usage as usages
from gateway.errors import Api
from policies.model import Usage

_FINE = frozenset({"max_output_tokens", "content_filter"})


@dataclass(slots=True)
class Reading:
    usage: Usage | None = None
    aborted: bool = False
    response_id: str = ""


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
        return document.get("status") in ("cancelled", "incomplete") and reason is not None and reason not in _FINE
    choices = document.get("choices")
    if type(choices) is list:
        for choice in choices:
            if type(choice) is dict and choice.get("finish_reason") in ("abort", "error"):
                return True
    return False


def _id(api: Api, document: dict[str, Any]) -> str:
    value = document.get("id") if api is Api.RESPONSES else None
    return value if isinstance(value, str) else ""
