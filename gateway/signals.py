"""What an attempt, a probe or a scrape shows about a replica: the closed set of signs that decide its health.

vLLM answers `/health` with 200 while its engine hangs, is paused or asleep, ends streams cleanly with `abort` when
it is told to stop, and turns away work with 503 when its queue is full. So a status code alone says little: the
data path reports what it saw in one of these words, and `health.py` decides.
"""

from __future__ import annotations

from enum import Enum


class Sign(Enum):
    """A sign and what it weighs. HARD ejects at once, SOFT by statistics, NONE does not count."""

    OK = "ok"  # content came, or a complete answer
    CLIENT_ERROR = "client_error"  # deterministic 4xx: the client's own
    OURS = "ours"  # the gateway stops, or is short of sockets: nothing about the replica
    BACKPRESSURE = "backpressure"  # its queue limit (503/429): load, not ill health
    REFUSED = "refused"  # connect refused or unreachable
    CONNECT_TIMEOUT = "connect_timeout"  # its host is gone, or it is too busy to accept: /health knows which
    TLS = "tls"  # certificate or handshake refused
    ABORT = "abort"  # finish_reason abort that nobody asked for: it is shutting down
    ENGINE_DEAD = "engine_dead"  # EngineDeadError, or /health 503
    ERROR_STATUS = "error_status"  # 5xx that is no queue limit
    ERROR_EVENT = "error_event"  # error object inside a stream
    EARLY_END = "early_end"  # end of body before the terminal event
    RESET = "reset"  # connection reset on a fresh connection or in mid-answer
    FIRST_EVENT_TIMEOUT = "first_event_timeout"
    IDLE_TIMEOUT = "idle_timeout"
    PROTOCOL = "protocol"  # bytes that are no HTTP
    HUNG = "hung"  # requests in flight and no engine step
    ASLEEP = "asleep"  # engine_sleep_state{awake} = 0
    PROBE_FAILED = "probe_failed"  # /health answered something else, or broke off
    PROBE_LATE = "probe_late"  # no answer to /health in time


HARD = frozenset({Sign.REFUSED, Sign.TLS, Sign.ABORT, Sign.ENGINE_DEAD, Sign.HUNG, Sign.ASLEEP})
SOFT = frozenset(
    {
        Sign.CONNECT_TIMEOUT,
        Sign.ERROR_STATUS,
        Sign.ERROR_EVENT,
        Sign.EARLY_END,
        Sign.RESET,
        Sign.FIRST_EVENT_TIMEOUT,
        Sign.IDLE_TIMEOUT,
        Sign.PROTOCOL,
    }
)
