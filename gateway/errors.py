"""Every refusal of the gateway, and the one renderer for each API's error form.

A refusal is a value: status, code of a closed set, message, and where it helps an honest Retry-After. It is rendered
as an HTTP body before commit and as an error event after it, in the form that the endpoint's own clients parse:
OpenAI (`{"error": {...}}`), Responses (the same body; event `error`), Anthropic (`{"type": "error", ...}`).
Retry-After is spread over +0..25 % so that refused clients do not come back together. `x-should-retry: false`, sent
instead of it, tells the official clients, which retry 429 by themselves, that a retry cannot succeed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import orjson

RETRY_JITTER = 0.25
JSON_TYPE = (b"content-type", b"application/json")


class Api(StrEnum):
    """Which error form (and stream grammar) an endpoint speaks."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OTHER = "other"


class Code(StrEnum):
    MALFORMED = "malformed"
    NO_KEY = "no_key"
    BAD_KEY = "bad_key"
    CLASS_NOT_ALLOWED = "class_not_allowed"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_PATH = "unknown_path"
    UNKNOWN_RESPONSE = "unknown_response"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BODY_TOO_SLOW = "body_too_slow"
    TOO_LARGE = "too_large"
    UPGRADE = "upgrade"
    INFEASIBLE = "infeasible"
    QUEUE_FULL = "queue_full"
    OVER_QUOTA = "over_quota"
    HEADERS_TOO_LARGE = "headers_too_large"
    INTERNAL = "internal"
    UPSTREAM = "upstream"
    NO_REPLICA = "no_replica"
    DRAINING = "draining"
    EXPIRED = "expired"


# code -> status, OpenAI type, Anthropic type
FORMS: dict[Code, tuple[int, str, str]] = {
    Code.MALFORMED: (400, "invalid_request_error", "invalid_request_error"),
    Code.NO_KEY: (401, "authentication_error", "authentication_error"),
    Code.BAD_KEY: (401, "authentication_error", "authentication_error"),
    Code.CLASS_NOT_ALLOWED: (403, "permission_error", "permission_error"),
    Code.UNKNOWN_MODEL: (404, "not_found_error", "not_found_error"),
    Code.UNKNOWN_PATH: (404, "not_found_error", "not_found_error"),
    Code.UNKNOWN_RESPONSE: (404, "not_found_error", "not_found_error"),
    Code.METHOD_NOT_ALLOWED: (405, "invalid_request_error", "invalid_request_error"),
    Code.BODY_TOO_SLOW: (408, "timeout_error", "timeout_error"),
    Code.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    Code.UPGRADE: (426, "invalid_request_error", "invalid_request_error"),
    Code.INFEASIBLE: (429, "rate_limit_error", "rate_limit_error"),
    Code.QUEUE_FULL: (429, "rate_limit_error", "rate_limit_error"),
    Code.OVER_QUOTA: (429, "rate_limit_error", "rate_limit_error"),
    Code.HEADERS_TOO_LARGE: (431, "invalid_request_error", "invalid_request_error"),
    Code.INTERNAL: (500, "server_error", "api_error"),
    Code.UPSTREAM: (502, "server_error", "api_error"),
    Code.NO_REPLICA: (503, "server_error", "overloaded_error"),
    Code.DRAINING: (503, "server_error", "overloaded_error"),
    Code.EXPIRED: (504, "timeout_error", "timeout_error"),
}

OVERLOADED = "the gateway itself is overloaded"
SHED_MESSAGES = {
    Code.INFEASIBLE: "no replica can meet the objectives of this request now",
    Code.QUEUE_FULL: "the queue of this service class is full",
    Code.OVER_QUOTA: "this key is over its rate or its number of open requests; wait as long as Retry-After says",
    Code.NO_REPLICA: "no replica that serves this model is available",
    Code.DRAINING: "the gateway is shutting down",
    Code.EXPIRED: "the deadline of this request has passed",
}


@dataclass(slots=True)
class GatewayError(Exception):
    """A refusal or failure of ours. `retry_after_s` None: no Retry-After; `param` names the field at fault."""

    code: Code
    message: str
    retry_after_s: float | None = None
    param: str | None = None
    retriable: bool | None = None  # sent as x-should-retry where it is known
    allow: str | None = None  # 405: the methods that work

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    @property
    def status(self) -> int:
        return FORMS[self.code][0]


def shed(
    reason: str,
    retry_after_s: float | None,
    objectives_s: Mapping[str, float] | None = None,
    predicted_ttft_s: float | None = None,
    said: str | None = None,
) -> GatewayError:
    """The refusal for a reason of the core; an unknown reason is our fault, never a silent 200.

    retry_after_s: when the core predicts room for it; None: there never will be for this request.
    objectives_s: what it had to meet, in seconds from receipt, as {"first token": 0.2}.
    predicted_ttft_s: when an idle replica would have had the first token, where that is what was too late.
    said: the message, where whoever refused knows a better one than the usual."""
    code = Code(reason) if reason in Code._value2member_map_ else Code.INTERNAL
    message = said or SHED_MESSAGES.get(code, f"refused: {reason}")
    hopeless = code is Code.EXPIRED or (code is Code.INFEASIBLE and retry_after_s is None)
    if code is Code.INFEASIBLE:
        if hopeless:
            message = "not even an idle replica could meet the objectives of this request"
        within = ", ".join(f"{what} within {s * 1000:.0f} ms" for what, s in (objectives_s or {}).items())
        message += f": {within}" if within else ""
        message += f"; predicted in {predicted_ttft_s * 1000:.0f} ms" if predicted_ttft_s is not None else ""
    return GatewayError(code, message, None if hopeless else retry_after_s, retriable=False if hopeless else None)


def body(error: GatewayError, api: Api, request_id: str = "") -> bytes:
    """The JSON body of a refusal, in the API's own form."""
    _, openai_type, anthropic_type = FORMS[error.code]
    if api is Api.MESSAGES:
        inner = {"type": anthropic_type, "message": error.message, "code": error.code}
        return orjson.dumps({"type": "error", "error": inner, "request_id": request_id or None})
    return orjson.dumps(
        {"error": {"message": error.message, "type": openai_type, "param": error.param, "code": error.code}}
    )


def event(error: GatewayError, api: Api, request_id: str = "", sequence: int = 0) -> bytes:
    """The same as one server-sent event, for streams that are already committed. `sequence` is for Responses."""
    if api is Api.MESSAGES:
        return b"event: error\ndata: " + body(error, api, request_id) + b"\n\n"
    if api is Api.RESPONSES:
        data = {
            "type": "error",
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "sequence_number": sequence,
        }
        return b"event: error\ndata: " + orjson.dumps(data) + b"\n\n"
    return b"data: " + body(error, api, request_id) + b"\n\n"


def event_of(body: bytes, api: Api) -> bytes:
    """A replica's own JSON error as an event, for a stream that was committed before it came."""
    data = b"data: " + body.replace(b"\r", b"").replace(b"\n", b" ") + b"\n\n"
    return b"event: error\n" + data if api in (Api.MESSAGES, Api.RESPONSES) else data


def headers(error: GatewayError, rng: random.Random) -> list[tuple[bytes, bytes]]:
    """The headers that belong to a refusal beside content-length and x-request-id."""
    lines = [JSON_TYPE]
    if error.retry_after_s is not None:
        spread = max(0.0, error.retry_after_s) * (1.0 + RETRY_JITTER * rng.random())
        lines.append((b"retry-after", b"%d" % max(1, math.ceil(spread))))
    if error.retriable is not None:
        lines.append((b"x-should-retry", b"true" if error.retriable else b"false"))
    if error.allow is not None:
        lines.append((b"allow", error.allow.encode()))
    if error.code is Code.UPGRADE:
        lines += [(b"upgrade", b"HTTP/1.1"), (b"connection", b"close")]
    if error.code in (Code.NO_KEY, Code.BAD_KEY):
        lines.append((b"www-authenticate", b"Bearer"))
    return lines
