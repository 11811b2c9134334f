"""What the gateway knows about one request, from receipt to its journal line. Plain data, one owner.

The proxy makes one `RequestRecord` per request and is the only writer; metrics and journal read it once, after
the end. Times are monotonic seconds of the same clock that the core is given; `received_unix` alone is wall time.
Tokens carry where they came from, because a number from `usage` and a guess must never be averaged together.
Trade-off: one mutable object instead of many small ones, since a request creates it on the hot path.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mypy_extensions import mypyc_attr

from policies.designs import Assignment
from policies.model import Alternative, Outcome, Prediction, Shadowed
from policies.objectives import Objectives, Partition, Timing, tpot_s


class TokenSource(StrEnum):
    USAGE = "usage"  # the replica's own usage object
    EVENTS = "events"  # content events times the replica's tokens per event
    ESTIMATE = "estimate"  # from bytes, or from what the core expected to be cached


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Tokens:
    count: int | None
    source: TokenSource

    def __init__(
        self,
        count: int | None = None,
        source: TokenSource = TokenSource.ESTIMATE,
    ) -> None:
        self.count = count
        self.source = source


@dataclass(slots=True, frozen=True)
class Unmatched:
    """What stands where the prompt parts from others of its family: where it is, never what it says."""

    kind: str  # of leak: timestamp | uuid | user_name | tool_order | ... (`policies/volatile.py`)
    path: str  # JSON path, as messages[0].content
    offset: int  # bytes into the canonical prompt stream
    family: str = ""  # as the gateway that wrote it numbered them
    lost_tokens: int = 0  # not shared because of it, by this request and those that it stands for
    requests: int = 1  # that it stands for


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Attempt:
    replica_id: str
    t_dispatch: float
    t_first: float | None
    outcome: Outcome | None
    detail: str  # closed set: refused, reset, first_event_timeout, http_503, abort, ...

    def __init__(
        self,
        replica_id: str,
        t_dispatch: float,
        t_first: float | None = None,
        outcome: Outcome | None = None,
        detail: str = "",
    ) -> None:
        self.replica_id = replica_id
        self.t_dispatch = t_dispatch
        self.t_first = t_first
        self.outcome = outcome
        self.detail = detail


_NO_TOKENS = Tokens()
_NO_OBJECTIVES = Objectives()
_AT_ONCE_MS = 0.05  # less than what is shown
_OWN_LINES_AT_ONCE = (
    b"x-request-id: %b\r\nx-forebay-replica: %b\r\nx-forebay-reason: %b\r\nx-forebay-queue-ms: 0.0\r\n"
    b"server-timing: queue;dur=0.0, upstream;dur=%.1f\r\n"
)
_OWN_LINES = (
    b"x-request-id: %b\r\nx-forebay-replica: %b\r\nx-forebay-reason: %b\r\nx-forebay-queue-ms: %.1f\r\n"
    b"server-timing: queue;dur=%.1f, upstream;dur=%.1f\r\n"
)


class RequestRecord:
    """Fields start as the class has them: making forty of them for every request would cost more than filling ten."""

    request_id: str
    received_at: float  # monotonic seconds at receipt of the full request
    received_unix: float = 0.0
    endpoint: str = ""  # pattern of the allow table, never the raw path
    kind: str = "generate"  # kind of the endpoint: generate, pool, cheap, stateful
    model: str = ""
    adapter: str | None = None
    tenant: str | None = None  # name from the configuration; hashed before it reaches the journal
    session: str | None = None  # hashed as well
    service_class: str = "standard"
    arm: str | None = None
    policy: str = ""
    assignment: Assignment | None = None  # where it stands in the experiment that ran when it came
    objectives: Objectives
    streams: bool = True
    prompt_bytes: int = 0
    prompt: Tokens
    completion: Tokens
    cached: Tokens
    chain: tuple[int, ...] = ()
    cacheable_tokens: int | None = None  # what one endless cache would have had; None: no prefix chain
    unmatched: Unmatched | None = None
    sampled: Any = None  # where `prefixes.py` counts its tokens, when it looked into this request
    attempts: list[Attempt]
    client_retry: int = 0  # x-stainless-retry-count of official clients: counted apart
    choice_reason: str = ""  # affinity, spill, cold, ... of the last dispatch
    prediction: Prediction | None = None
    alternatives: tuple[Alternative, ...] = ()
    shadows: tuple[Shadowed, ...] = ()
    committed_at: float | None = None  # response headers written
    first_content_at: float | None = None
    last_content_at: float | None = None
    longest_gap_s: float = 0.0
    content_events: int = 0
    ended_at: float | None = None
    status: int = 0  # what the client saw; 0 when it left before any
    outcome: Outcome | None = None
    partition: Partition | None = None
    reason: str = ""  # closed set: code of the error, shed reason, or the detail of the last attempt
    sample: bytes | None = None  # prompt body, only when the operator switched samples on

    def __init__(self, request_id: str, received_at: float, **known: Any) -> None:
        self.request_id = request_id
        self.received_at = received_at
        self.attempts = []
        self.objectives = _NO_OBJECTIVES
        self.prompt = self.completion = self.cached = _NO_TOKENS
        for name, value in known.items():
            setattr(self, name, value)

    def attempt(self, replica_id: str, now: float) -> Attempt:
        """Starts the next attempt; dispatch and its I/O begin at `now`."""
        started = Attempt(replica_id, now)
        self.attempts.append(started)
        return started

    @property
    def replica_id(self) -> str | None:
        """The replica that served it last; None when it was never dispatched."""
        return self.attempts[-1].replica_id if self.attempts else None

    @property
    def queue_wait_s(self) -> float | None:
        """Receipt to first dispatch; None when it was never dispatched."""
        return self.attempts[0].t_dispatch - self.received_at if self.attempts else None

    @property
    def charged_tokens(self) -> int | None:
        """Tokens a tenant is charged for: none for a refusal, None where nobody counted the prompt."""
        if self.outcome is Outcome.SHED or not self.attempts:
            return 0
        return None if self.prompt.count is None else self.prompt.count + (self.completion.count or 0)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_content_at is None else self.first_content_at - self.received_at

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_at is None else self.ended_at - self.received_at

    def own_lines(self, request_id: bytes, now: float) -> bytes:
        """The response headers that are ours; server-timing: milliseconds in our queue, and from dispatch to now."""
        if not self.attempts:
            return _OWN_LINES % (request_id, b"", self.choice_reason.encode(), 0.0, 0.0, 0.0)
        last = self.attempts[-1]
        wait_ms = (self.attempts[0].t_dispatch - self.received_at) * 1000.0
        upstream_ms = (now - last.t_dispatch) * 1000.0
        replica, reason = last.replica_id.encode(), self.choice_reason.encode()
        if wait_ms < _AT_ONCE_MS:
            return _OWN_LINES_AT_ONCE % (request_id, replica, reason, upstream_ms)
        return _OWN_LINES % (request_id, replica, reason, wait_ms, wait_ms, upstream_ms)

    def timing(self) -> Timing:
        """The finished record as `objectives.judge` reads it; the end must be known."""
        assert self.ended_at is not None
        last = self.last_content_at
        return Timing(
            first_content_s=self.ttft_s,
            last_content_s=None if last is None else last - self.received_at,
            end_s=self.ended_at - self.received_at,
            output_tokens=self.completion.count or 0,
            longest_gap_s=self.longest_gap_s,
            streamed=self.streams,
            generates=self.kind == "generate",
        )

    @property
    def tpot_s(self) -> float | None:
        """As `Timing.tpot_s`; None where it is not applicable."""
        return tpot_s(self.first_content_at, self.last_content_at, self.completion.count)
