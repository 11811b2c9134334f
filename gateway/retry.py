"""What an attempt that failed means: for the request's outcome, for the replica's health, and for another try.

A retry happens before commit only, on another replica, where the endpoint allows it, within the deadline and under a
budget: a share of requests plus a constant rate (as in Finagle and Envoy), so that a fleet in trouble does not
get its load multiplied. Deterministic 4xx pass through and count against nobody; the replica's own queue limit
(503/429) is load, not ill health.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway import errors
from gateway.errors import Code, GatewayError
from gateway.http1 import Break
from gateway.signals import Sign
from policies.model import Outcome

BURST = 10.0  # retries that may come at once
# vLLM 0.32 closes the pool that renders prompts when its drain begins. Quotes inside a client's text are escaped in
# JSON, so nobody can forge the field.
_POOL_CLOSED = b'"message":"cannot schedule new futures after '


class RetryBudget:
    """Tokens earned by requests and by time; each retry takes one."""

    __slots__ = ("_at", "_level", "per_s", "share")

    def __init__(self, share: float, per_s: float) -> None:
        self.share = share
        self.per_s = per_s
        self._level = BURST
        self._at: float | None = None

    def request(self) -> None:
        self._level = min(BURST, self._level + self.share)

    def take(self, now: float) -> bool:
        if self._at is not None:
            self._level = min(BURST, self._level + self.per_s * max(0.0, now - self._at))
        self._at = now
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True

    def give_back(self) -> None:
        """The retry did not happen: nobody else was there."""
        self._level = min(BURST, self._level + 1.0)


@dataclass(slots=True, frozen=True)
class Failure:
    """One failed attempt. `detail` is of a closed set and goes to record and metrics."""

    detail: str
    outcome: Outcome
    sign: Sign
    retriable: bool


BREAKS: dict[Break, Failure] = {
    Break.REFUSED: Failure("refused", Outcome.ERROR, Sign.REFUSED, True),
    Break.CONNECT_TIMEOUT: Failure("connect_timeout", Outcome.ERROR, Sign.CONNECT_TIMEOUT, True),
    Break.RESET: Failure("reset", Outcome.ERROR, Sign.RESET, True),
    Break.CLOSED: Failure("early_end", Outcome.ERROR, Sign.EARLY_END, True),
    Break.MALFORMED: Failure("protocol", Outcome.ERROR, Sign.PROTOCOL, True),
    Break.NO_SOCKET: Failure("no_socket", Outcome.SHED, Sign.OURS, False),
}
DRAINING = Failure("draining", Outcome.SHED, Sign.OURS, False)
NO_SOCKET = BREAKS[Break.NO_SOCKET]
FIRST_EVENT_TIMEOUT = Failure("first_event_timeout", Outcome.ERROR, Sign.FIRST_EVENT_TIMEOUT, True)
IDLE_TIMEOUT = Failure("idle_timeout", Outcome.ERROR, Sign.IDLE_TIMEOUT, True)
ABORT = Failure("abort", Outcome.ERROR, Sign.ABORT, True)
EARLY_END = BREAKS[Break.CLOSED]
EXPIRED = Failure("expired", Outcome.EXPIRED, Sign.BACKPRESSURE, False)
ENGINE_DEAD = Failure("engine_dead", Outcome.ERROR, Sign.ENGINE_DEAD, True)
SHUTTING_DOWN = Failure("shutting_down", Outcome.ERROR, Sign.ABORT, True)
PREEMPTED = Failure("preempted", Outcome.CANCELLED, Sign.BACKPRESSURE, True)


def of_status(status: int, body: bytes) -> Failure | None:
    """What an error status says; None for success. 500 is final, for it may be the request's, unless the engine is
    dead or the replica drains: new requests with text get a 500 then, prompts of token ids get `abort`."""
    if status < 400:
        return None
    if status in (429, 503):
        return Failure(f"http_{status}", Outcome.BACKPRESSURE, Sign.BACKPRESSURE, True)
    if status < 500:
        return Failure(f"http_{status}", Outcome.CLIENT_ERROR, Sign.CLIENT_ERROR, False)
    if _engine_dead(body):
        return ENGINE_DEAD
    if _POOL_CLOSED in body:
        return SHUTTING_DOWN
    return Failure(f"http_{status}" if status < 600 else "http_5xx", Outcome.ERROR, Sign.ERROR_STATUS, status == 502)


def of_error_event(error: dict[str, object]) -> tuple[int, Failure]:
    """Status and meaning of an error object inside a stream; vLLM puts the status it would have sent in `code`."""
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    message = error.get("message")
    meant = of_status(status, message.encode() if isinstance(message, str) else b"")
    assert meant is not None
    if meant.sign is Sign.ERROR_STATUS:
        return status, Failure("error_event", Outcome.ERROR, Sign.ERROR_EVENT, True)
    return status, meant


def _engine_dead(text: bytes) -> bool:
    return b"EngineDeadError" in text or b"EngineCore encountered an issue" in text


OF_CODE = {
    Code.INFEASIBLE: Outcome.SHED,
    Code.QUEUE_FULL: Outcome.SHED,
    Code.OVER_QUOTA: Outcome.SHED,
    Code.NO_REPLICA: Outcome.SHED,
    Code.DRAINING: Outcome.SHED,
    Code.EXPIRED: Outcome.EXPIRED,
    Code.UPSTREAM: Outcome.ERROR,
    Code.INTERNAL: Outcome.ERROR,
}
_MESSAGES = {
    "refused": "the replica took no connection",
    "connect_timeout": "the replica took no connection in time",
    "first_event_timeout": "the replica did not begin to answer in time",
    "idle_timeout": "the replica stopped in the middle of its answer",
    "abort": "the replica is shutting down and gave the request up",
    "protocol": "the replica's answer is not valid HTTP",
}


def told(failure: Failure) -> GatewayError:
    """What a client is told about an attempt that failed for good."""
    if failure is EXPIRED:
        return GatewayError(Code.EXPIRED, errors.SHED_MESSAGES[Code.EXPIRED], retriable=False)
    if failure.outcome is Outcome.BACKPRESSURE:
        return GatewayError(Code.NO_REPLICA, "every replica tried refused new work", 1.0)
    if failure is DRAINING:
        return GatewayError(Code.DRAINING, errors.SHED_MESSAGES[Code.DRAINING], 1.0)
    if failure is NO_SOCKET:
        return GatewayError(Code.QUEUE_FULL, errors.OVERLOADED, 1.0)
    return GatewayError(Code.UPSTREAM, _MESSAGES.get(failure.detail, "the replica's answer broke off"))
