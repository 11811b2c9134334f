"""What a client saw of one answer: when content came, how many tokens, and whether it ended as its API says.

An event is content when it carries non-empty text, reasoning, refusal, tool-call or audio delta; role-only first
events, envelopes, empty deltas, usage-only chunks and SSE comments are not. Complete: 2xx, no in-band error, the
terminal event of the API (`[DONE]`; `response.completed` or `.incomplete`; `message_stop`), a finish reason that
is neither `abort` nor `error`, usage present, and under forced length exactly that length.
Shares no code with the gateway on purpose: what is measured must not define the measurement. Times come from the
caller, one stamp for each read. The trade-off: each event is parsed as JSON here (about 2 us) on the reading loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from policies.objectives import Partition

RESPONSES_END = ("response.completed", "response.incomplete")
EXPIRED = "expired"
FAILED_FINISH = frozenset({"abort", "error"})


@dataclass(slots=True)
class Answer:
    """Owns everything read for one attempt. `feed` takes body bytes in order, `end` the clean end of the body."""

    streamed: bool = True
    generates: bool = True
    forced_tokens: int | None = None  # ignore_eos and max_tokens: the length the answer must have
    keep_text: bool = False

    status: int | None = None
    first_byte_at: float | None = None
    first_content_at: float | None = None
    last_content_at: float | None = None
    ended_at: float | None = None  # clean end of the body
    longest_gap_s: float = 0.0
    content_events: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    engine_metrics: dict[str, float] | None = None  # vLLM's --enable-per-request-metrics
    finish_reasons: dict[int, str] = field(default_factory=dict)
    terminal: bool = False
    error: str | None = None  # in-band error object or unreadable event
    error_code: int | None = None
    error_message: str | None = None  # its own words, beside the code
    text: list[str] = field(default_factory=list)
    _choices: set[int] = field(default_factory=set)
    _rest: bytes = b""
    _body: list[bytes] = field(default_factory=list)

    # -- bytes in --------------------------------------------------------------------------------------------------

    def feed(self, data: bytes, now: float) -> None:
        """Body bytes as they arrive. Events may share a read or span several."""
        if self.first_byte_at is None:
            self.first_byte_at = now
        if not self.streamed or self.status is None or self.status >= 300:
            self._body.append(data)
            return
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        # A read that ends in "\r" keeps it for the next one, where its "\n" follows.
        *blocks, self._rest = data.split(b"\n\n")
        for block in blocks:
            self._event(block, now)

    def end(self, now: float) -> None:
        """The body ended as HTTP says (final chunk, or Content-Length reached)."""
        self.ended_at = now
        if self._body:
            self._whole(b"".join(self._body), now)
            self._body.clear()

    # -- verdict ---------------------------------------------------------------------------------------------------

    @property
    def output_tokens(self) -> int:
        return self.completion_tokens or 0

    def fault(self) -> tuple[Partition, str] | None:
        """Why the answer is not complete, or None when it is."""
        if self.status is None:
            return Partition.ERROR_TRANSPORT, "no_response"
        if self.status in (429, 503):
            return Partition.REJECTED, self.error or f"http_{self.status}"
        if self.error == EXPIRED:  # the gateway gave it up at its deadline: late, not broken
            return Partition.SLOW_E2E, EXPIRED
        if self.status >= 300:
            return Partition.ERROR_HTTP, self.error or f"http_{self.status}"
        if self.error is not None:
            if self.content_events == 0 and self.error_code in (429, 503):
                return Partition.REJECTED, f"in_band_{self.error_code}"
            return Partition.TRUNCATED, f"in_band_error: {self.error}"
        if self.ended_at is None:
            return Partition.TRUNCATED, "connection_cut"
        if not self.generates:
            return None
        if self.streamed and not self.terminal:
            return Partition.TRUNCATED, "no_terminal_event"
        unfinished = self._choices - self.finish_reasons.keys()
        if unfinished or not self.finish_reasons:
            return Partition.TRUNCATED, "no_finish_reason"
        for reason in self.finish_reasons.values():
            if reason in FAILED_FINISH:
                return Partition.TRUNCATED, f"finish_{reason}"
        if self.completion_tokens is None:
            return Partition.TRUNCATED, "no_usage"
        if self.completion_tokens < 1:
            return Partition.TRUNCATED, "zero_tokens"
        if self.streamed and self.first_content_at is None:
            return Partition.TRUNCATED, "no_content"
        if self.forced_tokens is not None and self.completion_tokens != self.forced_tokens:
            return Partition.TRUNCATED, f"length_{self.completion_tokens}_of_{self.forced_tokens}"
        return None

    # -- events ----------------------------------------------------------------------------------------------------

    def _event(self, block: bytes, now: float) -> None:
        if block.startswith(b"data: ") and b"\n" not in block:
            payload = block[6:]  # the usual shape
        else:
            lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
            if not lines:
                return  # a comment, or an event without data
            payload = b"\n".join(lines)
        if payload == b"[DONE]":
            self.terminal = True
            return
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self.error = self.error or "event is not JSON"
            return
        if isinstance(event, dict):
            self._read(event, now)

    def _read(self, event: dict[str, Any], now: float) -> None:
        if event.get("error"):
            self._fail(event["error"])
            return
        kind = event.get("type")
        if isinstance(kind, str) and "choices" not in event:
            self._typed(kind, event, now)
            return
        for choice in event.get("choices") or ():
            index = choice.get("index", 0)
            self._choices.add(index)
            delta = choice.get("delta")
            piece = choice.get("text") if delta is None else _content(delta)
            if piece:
                self._content(piece, now)
            if choice.get("finish_reason"):
                self.finish_reasons[index] = choice["finish_reason"]
        self._usage(event.get("usage"))
        if event.get("metrics"):
            self.engine_metrics = event["metrics"]

    def _typed(self, kind: str, event: dict[str, Any], now: float) -> None:
        """Events of /v1/responses and /v1/messages."""
        if kind.startswith("response."):
            if kind.endswith(".delta") and event.get("delta"):
                self._content(event["delta"], now)
            elif kind in RESPONSES_END:
                self.terminal = True
                self.finish_reasons[0] = kind.removeprefix("response.")
                self._usage((event.get("response") or {}).get("usage"))
            elif kind == "response.failed":
                self._fail((event.get("response") or {}).get("error") or "response.failed")
        elif kind == "error":
            self._fail(event)
        elif kind == "content_block_delta":
            delta = event.get("delta") or {}
            piece = delta.get("text") or delta.get("thinking") or delta.get("partial_json")
            if piece:
                self._content(piece, now)
        elif kind == "message_start":
            self._usage((event.get("message") or {}).get("usage"))
        elif kind == "message_delta":
            reason = (event.get("delta") or {}).get("stop_reason")
            if reason:
                self.finish_reasons[0] = reason
            self._usage(event.get("usage"))
        elif kind == "message_stop":
            self.terminal = True

    def _content(self, piece: Any, now: float) -> None:
        if self.last_content_at is None:
            self.first_content_at = now
        elif now - self.last_content_at > self.longest_gap_s:
            self.longest_gap_s = now - self.last_content_at
        self.last_content_at = now
        self.content_events += 1
        if self.keep_text and isinstance(piece, str):
            self.text.append(piece)

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        output = usage.get("completion_tokens", usage.get("output_tokens"))
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        cached = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
        self.prompt_tokens = self.prompt_tokens if prompt is None else prompt
        self.completion_tokens = self.completion_tokens if output is None else output
        self.cached_tokens = self.cached_tokens if cached is None else cached

    def _fail(self, error: Any) -> None:
        if isinstance(error, dict):
            code = error.get("code")
            self.error_code = code if isinstance(code, int) else None
            self.error_message = str(error["message"]) if error.get("message") else None
            self.error = str(code if isinstance(code, str) else error.get("type") or error.get("message") or "error")
        else:
            self.error = str(error)

    def _whole(self, body: bytes, now: float) -> None:
        """A body that is not a stream: an answer, or the reason of a refusal."""
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            if self.status is not None and self.status < 300:
                self.error = "body is not JSON"
            return
        if not isinstance(answer, dict):
            return
        if answer.get("error"):
            self._fail(answer["error"])
            return
        if self.status is not None and self.status >= 300:
            return
        for choice in answer.get("choices") or ():
            index = choice.get("index", 0)
            self._choices.add(index)
            piece = choice["text"] if "text" in choice else _content(choice.get("message") or {})
            if piece:
                self._content(piece, now)
            if choice.get("finish_reason"):
                self.finish_reasons[index] = choice["finish_reason"]
        if answer.get("object") == "response" and answer.get("status") in ("completed", "incomplete"):
            self.finish_reasons[0] = answer["status"]
        elif answer.get("type") == "message" and answer.get("stop_reason"):
            self.finish_reasons[0] = answer["stop_reason"]
        self._usage(answer.get("usage"))
        if isinstance(answer.get("metrics"), dict):
            self.engine_metrics = answer["metrics"]


def _content(delta: dict[str, Any]) -> Any:
    """The non-empty generated part of a chat delta or message, else None."""
    for name in ("content", "reasoning", "reasoning_content", "refusal", "tool_calls", "audio", "function_call"):
        piece = delta.get(name)
        if piece:
            return piece
    return None
