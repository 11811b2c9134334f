"""What the gateway reads from a request: once, with orjson, and without changing a byte of it.

Routing needs the model, the session, the length and the canonical prompt; the data path needs to know whether the
answer is streamed and whether the client asked for usage. Unknown fields are nobody's business here. A body that is no
JSON where JSON belongs is refused in the API's own form; multipart bodies (audio) are routed by load alone.
Header objectives may tighten those of the class, never loosen them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway import large_json, usage
from gateway.endpoints import Endpoint, Kind
from gateway.errors import Code, GatewayError
from policies.canonical import canonical_parts

MOST_SESSION_CHARS = 256
MOST_TOKENS, MOST_ANSWERS = 1 << 32, 1 << 24  # what a client may ask for counts as no more; the product is below 2**63
_FORM_MODEL = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n')
_MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(slots=True, frozen=True)
class Tighter:
    """What the x-slo headers ask for, in seconds."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None


_AS_THE_CLASS = Tighter()


@dataclass(slots=True, init=False)
class Call:
    """One API call as parsed. `body` is as received; `parts` is what goes to the replica."""

    body: bytes
    parts: list[bytes | memoryview]
    document: Mapping[str, Any] | None  # None: not JSON
    model: str
    streams: bool
    withholds_usage: bool  # we asked for usage, the client did not
    wants_running_usage: bool
    session: str | None
    max_tokens: int | None
    answers: int  # n x prompts
    previous_response: str | None
    tighter: Tighter

    def __init__(
        self,
        body: bytes,
        parts: list[bytes | memoryview],
        document: Mapping[str, Any] | None = None,
        model: str = "",
        streams: bool = False,
        withholds_usage: bool = False,
        wants_running_usage: bool = False,
        session: str | None = None,
        max_tokens: int | None = None,
        answers: int = 1,
        previous_response: str | None = None,
        tighter: Tighter = _AS_THE_CLASS,
    ) -> None:
        self.body = body
        self.parts = parts
        self.document = document
        self.model = model
        self.streams = streams
        self.withholds_usage = withholds_usage
        self.wants_running_usage = wants_running_usage
        self.session = session
        self.max_tokens = max_tokens
        self.answers = answers
        self.previous_response = previous_response
        self.tighter = tighter

    @property
    def length(self) -> int:
        parts = self.parts
        return len(parts[0]) if len(parts) == 1 else sum([len(part) for part in parts], 0)

    def canonical(self, endpoint: Endpoint, model: str, adapter: str | None) -> list[bytes]:
        """The canonical prompt in parts; empty where there is none to match."""
        if self.document is None:
            return []
        return canonical_parts(endpoint.api, self.document, model=model, adapter=adapter)


def parse(endpoint: Endpoint, headers: Mapping[bytes, bytes], body: bytes, *, ask_usage: bool) -> Call:
    """Reads a request. `headers`: the first value of each name, lower case. Raises GatewayError(malformed)."""
    call = Call(body, [body] if body else [])
    if b"x-slo-ttft-ms" in headers or b"x-slo-tpot-ms" in headers or b"x-deadline-ms" in headers:
        call.tighter = Tighter(
            _milliseconds(headers, b"x-slo-ttft-ms"),
            _milliseconds(headers, b"x-slo-tpot-ms"),
            _milliseconds(headers, b"x-deadline-ms"),
        )
    given = headers.get(b"x-session-id")
    if given:
        call.session = given.decode("latin-1")[:MOST_SESSION_CHARS]
    if not body and endpoint.kind in (Kind.STATEFUL, Kind.CHEAP):
        return call
    kind = headers.get(b"content-type", b"application/json")
    if b"json" not in kind:
        form = _FORM_MODEL.search(body) if kind.startswith(b"multipart/") else None
        if form is not None:
            call.model = form[1].decode("utf-8", "replace")
        return call
    try:
        document = orjson.loads(body) if len(body) < large_json.LARGE_BYTES else large_json.loads(body)
    except orjson.JSONDecodeError as e:
        raise GatewayError(Code.MALFORMED, f"the request body is not valid JSON: {e}") from None
    if not isinstance(document, dict):
        raise GatewayError(Code.MALFORMED, "the request body must be a JSON object")
    call.document = document
    _fields(call, document)
    # Several answers: unasked, vLLM puts its fingerprint on the last event of each; asked, only on the usage event,
    # at the very end. To restore it each last event would have to wait for the longest answer. So nobody asks, and
    # completion tokens are events times the replica's tokens per event (source "events" in journal and metrics).
    if ask_usage and endpoint.asks_usage and call.streams and call.answers == 1:
        options = document.get("stream_options")
        asked = isinstance(options, dict) and options.get("include_usage") is True
        parts = usage.ask(body, options, "stream_options" in document)
        if parts is not None:
            call.parts, call.withholds_usage = parts, not asked
    return call


def _fields(call: Call, document: dict[str, Any]) -> None:
    model = document.get("model")
    if model is not None:
        if not isinstance(model, str):
            raise GatewayError(Code.MALFORMED, f"model must be text, not {type(model).__name__}", param="model")
        call.model = model
    call.streams = document.get("stream") is True
    options = document.get("stream_options")
    call.wants_running_usage = isinstance(options, dict) and options.get("continuous_usage_stats") is True
    if call.session is None:
        for name in ("session_id", "prompt_cache_key"):
            value = document.get(name)
            if isinstance(value, str) and value:
                call.session = value[:MOST_SESSION_CHARS]
                break
    for name in _MAX_TOKENS:
        value = document.get(name)
        if type(value) is int and value > 0:
            call.max_tokens = min(value, MOST_TOKENS)
            break
    n = document.get("n")
    prompt = document.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    call.answers = min((n if type(n) is int and n > 0 else 1) * prompts, MOST_ANSWERS)
    previous = document.get("previous_response_id")
    call.previous_response = previous if isinstance(previous, str) else None


def _milliseconds(headers: Mapping[bytes, bytes], name: bytes) -> float | None:
    given = headers.get(name)
    if given is None:
        return None
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1e9:
        label = name.decode()
        message = f"{label}: {given.decode('latin-1')!r} must be a positive number of milliseconds"
        raise GatewayError(Code.MALFORMED, message, param=label)
    return value / 1000.0
