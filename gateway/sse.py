"""What each event of a stream is, at the price of two comparisons for the usual one.

Streams are made of near-identical events: everything around the text is constant within a stream. The first content
event is parsed; the bytes before and after its text become a template, and an event that matches both and has text
between is content. Anything else is parsed: envelope events, usage, finish reasons, errors, the end. So no rule looks
for words inside text that a user or a model can choose. Trade-off: streams whose every event differs (log
probabilities, running usage) cost one JSON parse per event, about a microsecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from gateway import usage as usages
from gateway.errors import Api
from policies.model import Usage

# classes of an event, combined
CONTENT = 1
FINISH = 2  # a finish reason stands in it
USAGE = 4  # the extra event of include_usage: no choices
TERMINAL = 8
ERROR = 16
COMMENT = 32
ABORT = 64  # finish reason abort: the replica gave the request up

MAX_EVENT_BYTES = 4 * 1024 * 1024
_UNSET = b"\x00"  # no event starts with it
_MARKS: dict[Api, tuple[bytes, ...]] = {
    Api.CHAT: (b'"delta":{"content":"', b'"delta":{"reasoning":"', b'"delta":{"reasoning_content":"'),
    Api.COMPLETIONS: (b'"text":"',),
    Api.RESPONSES: (b'"delta":"',),
    Api.MESSAGES: (b'"text":"', b'"thinking":"', b'"partial_json":"'),
    Api.OTHER: (),
}
_FINE_ENDS = frozenset({"max_output_tokens", "content_filter", "max_tokens"})


class EventScanner:
    """Reads one stream. `prefix`, `at` and `suffix` are the template, public so that the hot path can test them."""

    __slots__ = (
        "_api", "_more", "_more_bytes", "at", "carry", "error", "events", "finish", "first_id", "forced_usage",
        "prefix", "suffix", "usage",
    )  # fmt: skip

    def __init__(self, api: Api) -> None:
        self._api = api
        self.carry = b""  # the incomplete event at the end of what was fed, or its beginning:
        self._more: list[bytes] = []  # and what follows of it
        self._more_bytes = 0
        self.prefix = _UNSET
        self.at = 1
        self.suffix = _UNSET
        self.usage: Usage | None = None
        self.finish: str | None = None
        self.error: dict[str, Any] | None = None
        self.events = 0  # seen, of any class, off the fast path
        self.forced_usage = False  # running usage that nobody asked for: the replica adds usage by itself
        self.first_id = ""  # id of a response object, for affinity

    def usual(self, payload: bytes) -> bool:
        """Whether this is exactly one content event of the known shape."""
        return (
            payload.startswith(self.prefix)
            and payload.endswith(self.suffix)
            and payload.find(b"\n\n") == len(payload) - 2
            and payload[self.at] != 0x22
            and not self.carry
        )

    def split(self, payload: bytes) -> list[tuple[bytes, int]]:
        """Complete events with their classes; what is incomplete waits. Raises ValueError for an endless event."""
        searched = 0
        if self.carry:
            if b"\n" not in payload:  # no event ends here: not even joined yet, for events of megabytes
                self._more.append(payload)
                self._more_bytes += len(payload)
                self._bound(len(self.carry) + self._more_bytes)
                return []
            before = self.carry if not self._more else b"".join([self.carry, *self._more])
            searched = max(0, len(before) - 3)  # an end may have begun in its last bytes
            payload = before + payload
            self.carry, self._more_bytes = b"", 0
            self._more.clear()
        found: list[tuple[bytes, int]] = []
        at, size = 0, len(payload)
        while at < size:
            begin = max(at, searched)
            end = payload.find(b"\n\n", begin)
            crlf = payload.find(b"\r\n\r\n", begin, end if end >= 0 else size)
            if crlf >= 0:
                end = crlf + 4
            elif end >= 0:
                end += 2
            else:
                self.carry = payload[at:]
                self._bound(len(self.carry))
                break
            event = payload[at:end]
            found.append((event, self.classify(event)))
            at = end
        return found

    def _bound(self, size: int) -> None:
        if size > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")

    def classify(self, event: bytes) -> int:
        """Class of one complete event; fills usage, finish, error; learns the template from content."""
        self.events += 1
        data = data_of(event)
        if data is None:
            return COMMENT
        if data == b"[DONE]":
            return TERMINAL
        try:
            parsed = orjson.loads(data)
        except orjson.JSONDecodeError:
            return CONTENT if data else COMMENT  # not ours to judge: somebody's text
        if not isinstance(parsed, dict):
            return 0
        if self._api is Api.RESPONSES:
            kind = self._response(parsed)
        elif self._api is Api.MESSAGES:
            kind = self._message(parsed)
        else:
            kind = self._choices(parsed)
        if kind == CONTENT:
            self._learn(event)
        return kind

    def _choices(self, parsed: dict[str, Any]) -> int:
        """Chat and completions."""
        if parsed.get("error"):
            return self._failed(parsed["error"])
        choices = parsed.get("choices")
        told = usages.read(parsed.get("usage"))
        if told is not None:
            self.usage = told
            if not choices:
                return USAGE
            self.forced_usage = True
        kind = 0
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            delta = choice.get("delta")
            if choice.get("text") or (isinstance(delta, dict) and _says(delta)):
                kind |= CONTENT
            reason = choice.get("finish_reason")
            if reason:
                kind |= self._finished(_text(reason))
        return kind

    def _response(self, parsed: dict[str, Any]) -> int:
        kind = _text(parsed.get("type"))
        if kind.endswith(".delta"):
            return CONTENT if parsed.get("delta") else 0
        if kind == "error":
            return self._failed(parsed)
        if not kind and parsed.get("error"):
            return self._failed(parsed["error"])
        response = parsed.get("response")
        if not isinstance(response, dict):
            return 0
        if kind == "response.created":
            self.first_id = _text(response.get("id"))
        if kind == "response.failed":
            return self._failed(response.get("error") or {"message": "response failed"}) | TERMINAL
        if kind in ("response.completed", "response.incomplete"):
            self.usage = usages.read(response.get("usage"))
            details = response.get("incomplete_details")
            reason = details.get("reason") if isinstance(details, dict) else None
            fine = not isinstance(reason, str) or reason in _FINE_ENDS
            return TERMINAL | self._finished("stop" if fine else _text(reason))
        return 0

    def _message(self, parsed: dict[str, Any]) -> int:
        kind = parsed.get("type")
        if kind == "content_block_delta":
            delta = parsed.get("delta")
            return CONTENT if isinstance(delta, dict) and _says(delta) else 0
        if kind == "message_start":
            message = parsed.get("message")
            self.usage = usages.read(message.get("usage")) if isinstance(message, dict) else None
            return 0
        if kind == "message_delta":
            self.usage = usages.merge(self.usage, usages.read(parsed.get("usage")))
            delta = parsed.get("delta")
            reason = delta.get("stop_reason") if isinstance(delta, dict) else None
            return self._finished(_text(reason)) if reason else 0
        if kind == "message_stop":
            return TERMINAL
        if kind == "error" or (kind is None and parsed.get("error")):
            return self._failed(parsed.get("error"))
        return 0

    def _finished(self, reason: str) -> int:
        if self.finish not in ("abort", "error"):
            self.finish = reason
        return FINISH | ABORT if reason in ("abort", "error", "cancelled") else FINISH

    def _failed(self, error: Any) -> int:
        self.error = error if isinstance(error, dict) else {"message": _text(error)}
        return ERROR

    def _learn(self, event: bytes) -> None:
        """Takes the bytes around the text of a content event as the template for the next ones."""
        if not event.endswith(b"\n\n"):
            return
        for mark in _MARKS[self._api]:
            start = event.find(mark)
            if start >= 0:
                break
        else:
            return
        at = start + len(mark)
        end = event.find(b'"', at)
        while end > 0 and (end - len(event[at:end].rstrip(b"\\")) - at) % 2:
            end = event.find(b'"', end + 1)
        # Responses number their events, so only the head is constant; it names the type of the event
        self.suffix = b"\n\n" if self._api is Api.RESPONSES else event[end:]
        self.prefix, self.at = event[:at], at


def _text(value: Any) -> str:
    """What should be text; anything else is none. Not `str(value)`: of a list a thousand deep Python writes none."""
    return value if isinstance(value, str) else ""


def _says(delta: Mapping[str, Any]) -> bool:
    """Any text, reasoning, refusal, tool call or audio, whatever the key is called; a role or type alone is none."""
    return any(value for key, value in delta.items() if key not in ("role", "type"))


def data_of(event: bytes) -> bytes | None:
    """The joined data lines of an event; None where it has none (comments, pings of the transport)."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2:
        return event[6:].strip()
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
