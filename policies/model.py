"""The words of the core as data: requests, views of replicas, events in, decisions out.

Everything that crosses the border of `policies/` is one of these. Times are monotonic seconds given by the caller,
tokens are the model's, bytes are of the canonical prompt stream (`prefix.py`). Requests and events are made by the
shell (live) or by the simulator (virtual time), decisions and views (`view.py`) by the core. What is made once per
request is not frozen, because freezing triples the cost of making it; nobody changes one all the same. What the core
makes itself has its `__init__` written out: one that `dataclasses` generates is never compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from mypy_extensions import mypyc_attr

from policies.request import Request as Request
from policies.request import Shadowed as Shadowed
from policies.view import Choice as Choice
from policies.view import FleetView as FleetView
from policies.view import ReplicaView as ReplicaView


class Outcome(StrEnum):
    """How an attempt or a request ended, and what each means for the fits and for the health of the replica."""

    SUCCESS = "success"
    CLIENT_ERROR = "client_error"  # 4xx of ours or of the replica: releases only
    CANCELLED = "cancelled"  # client left: releases only
    SHED = "shed"  # refused by admission
    EXPIRED = "expired"  # deadline passed after dispatch: a late sample
    BACKPRESSURE = "backpressure"  # the replica's own queue limit (503/429): load, not ill health
    ERROR = "error"  # 5xx, reset, first-event timeout, abort not asked for: counts against the replica
    TRUNCATED = "truncated"  # failure after commit: counts against the replica


@dataclass(slots=True, frozen=True)
class ServiceClass:
    """Objectives and rights of one kind of traffic. None means the objective does not apply."""

    name: str
    ttft_s: float | None = 10.0
    ttft_s_per_token: float = 0.0005  # added per prompt token
    tpot_s: float | None = 0.2
    itl_s: float | None = None  # longest gap allowed between content events
    e2e_s: float | None = None  # deadline of the whole request
    weight: float = 1.0  # value of a good request, and the share between classes
    floor_share: float = 0.0  # share of prefill seconds it keeps whatever the others do
    sheddable: bool = True
    max_wait_s: float | None = None  # longest hold in the gateway; None: until its latest start
    fill_only: bool = False  # runs only in spare pacing and KV headroom (batch)
    engine_priority: int | None = None  # forwarded to replicas that schedule by priority; lower goes first


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Usage:
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None

    def __init__(
        self,
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens
        self.cached_tokens = cached_tokens


@dataclass(slots=True)
class Pulse:
    """What the streams of one replica did since the last pulse (about 50 ms)."""

    live: int = 0  # streams that have had their first token and are not finished
    near: int = 0  # of these (4 tokens or more), how many run above 0.85 of their own TPOT objective
    least_slack_s: float | None = None  # smallest objective minus running mean TPOT among them
    idle_gaps: int = 0  # gaps between content events while the replica's prefill backlog was zero
    idle_gap_sum_s: float = 0.0
    busy_gaps: int = 0  # the same while it was not zero
    busy_gap_sum_s: float = 0.0


# -- decisions ---------------------------------------------------------------------------------------------------


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Prediction:
    """What the core believed when it dispatched; compared later with what happened."""

    ttft_s: float  # from dispatch to first token
    tpot_s: float
    uncached_tokens: int
    cached_tokens: int
    scraped_age_s: float | None

    def __init__(
        self,
        ttft_s: float = 0.0,
        tpot_s: float = 0.0,
        uncached_tokens: int = 0,
        cached_tokens: int = 0,
        scraped_age_s: float | None = None,
    ) -> None:
        self.ttft_s = ttft_s
        self.tpot_s = tpot_s
        self.uncached_tokens = uncached_tokens
        self.cached_tokens = cached_tokens
        self.scraped_age_s = scraped_age_s


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Alternative:
    replica_id: str
    score: float  # lower is better; seconds where the policy says so
    cached_tokens: int
    predicted_ttft_s: float
    scraped_age_s: float | None

    def __init__(
        self, replica_id: str, score: float, cached_tokens: int, predicted_ttft_s: float, scraped_age_s: float | None
    ) -> None:
        self.replica_id = replica_id
        self.score = score
        self.cached_tokens = cached_tokens
        self.predicted_ttft_s = predicted_ttft_s
        self.scraped_age_s = scraped_age_s


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Dispatch:
    request_id: str
    replica_id: str
    reason: str
    prediction: Prediction | None
    alternatives: tuple[Alternative, ...]

    def __init__(
        self,
        request_id: str,
        replica_id: str,
        reason: str = "",
        prediction: Prediction | None = None,
        alternatives: tuple[Alternative, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.replica_id = replica_id
        self.reason = reason
        self.prediction = prediction
        self.alternatives = alternatives


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Hold:
    request_id: str
    until: float  # latest time at which it is decided again

    def __init__(
        self,
        request_id: str,
        until: float,
    ) -> None:
        self.request_id = request_id
        self.until = until


@mypyc_attr(acyclic=True)
@dataclass(slots=True, frozen=True)
class Shed:
    request_id: str
    reason: str  # infeasible | queue_full | over_quota | no_replica | draining | expired
    retry_after_s: float | None = None  # None: a retry cannot succeed, however idle the fleet is
    predicted_ttft_s: float | None = None  # then: from an idle replica
    said: str | None = None  # in words for the client; None: the usual ones of the reason


@dataclass(slots=True, frozen=True)
class Abort:
    """Stop an attempt that is under way: cancel it upstream; `requeue` says whether the core holds it again."""

    request_id: str
    reason: str
    requeue: bool = False


Decision: TypeAlias = Dispatch | Hold | Shed | Abort


@dataclass(slots=True)
class Scraped:
    """Values of one `/metrics` read; None is unknown, never zero. Also the event that carries them to the core."""

    replica_id: str = ""
    at: float = 0.0  # when the answer was read
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None  # 0..1 of blocks held by live requests
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    prefix_queries: float | None = None  # tokens, counter
    prefix_hits: float | None = None  # tokens, counter
    prompt_tokens: float | None = None  # counter
    generation_tokens: float | None = None  # counter
    preemptions: float | None = None  # counter
    iterations: float | None = None  # engine steps, counter: a heartbeat
    awake: bool | None = None
    started_at: float | None = None  # process start, unix seconds: a change is a restart
    adapters_running: tuple[str, ...] = ()
    adapters_waiting: tuple[str, ...] = ()
    max_adapters: int | None = None
    engines: tuple[tuple[str, float, float], ...] = ()  # label, requests it has, steps; only of several (data parallel)


# -- events ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Added:
    replica_id: str
    models: frozenset[str] = frozenset()  # empty: serves every model
    adapters: frozenset[str] = frozenset()
    weight: float = 1.0
    role: str = "both"
    slow_start_s: float = 0.0
    prefill_rate: float | None = None  # tokens/s, a hint until learnt
    kv_capacity_tokens: int | None = None


@dataclass(slots=True, frozen=True)
class Removed:
    replica_id: str


@dataclass(slots=True, frozen=True)
class Draining:
    replica_id: str
    draining: bool = True


@dataclass(slots=True, frozen=True)
class Ejected:
    replica_id: str
    reason: str = ""
    statistical: bool = False  # by error rate or latency; panic mode may keep such a replica in


@dataclass(slots=True, frozen=True)
class Returned:
    replica_id: str
    half_open: bool = False


@dataclass(slots=True, frozen=True)
class Restarted:
    replica_id: str


@dataclass(slots=True, frozen=True)
class PeerLoad:
    """What other gateways have on a replica."""

    replica_id: str
    in_flight: int = 0
    prefill_backlog_tokens: float = 0.0
    kv_tokens: float = 0.0
    at: float = 0.0
    live: int = 0  # as in `Pulse`, of their streams
    near: int = 0
    least_slack_s: float | None = None
    spent_s: float = 0.0  # prefill seconds that they sent there since this was told last
    parked_s: float = 0.0  # prefill seconds of what they hold for it

    def plus(self, other: PeerLoad) -> PeerLoad:
        """What two of them have there."""
        slacks = [s for s in (self.least_slack_s, other.least_slack_s) if s is not None]
        return PeerLoad(
            self.replica_id,
            self.in_flight + other.in_flight,
            self.prefill_backlog_tokens + other.prefill_backlog_tokens,
            self.kv_tokens + other.kv_tokens,
            min(self.at, other.at),
            self.live + other.live,
            self.near + other.near,
            min(slacks, default=None),
            self.spent_s + other.spent_s,
            self.parked_s + other.parked_s,
        )


FleetEvent: TypeAlias = Added | Removed | Draining | Ejected | Returned | Restarted | Scraped | PeerLoad


# -- events that only policies receive (RoutingPolicy.observe) -----------------------------------------------------


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Dispatched:
    request: Request
    replica_id: str

    def __init__(self, request: Request, replica_id: str) -> None:
        self.request = request
        self.replica_id = replica_id


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class FirstToken:
    request: Request
    replica_id: str
    ttft_s: float  # from dispatch
    predicted_ttft_s: float

    def __init__(self, request: Request, replica_id: str, ttft_s: float, predicted_ttft_s: float) -> None:
        self.request = request
        self.replica_id = replica_id
        self.ttft_s = ttft_s
        self.predicted_ttft_s = predicted_ttft_s


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Completed:
    request: Request
    replica_id: str
    outcome: Outcome
    usage: Usage | None
    e2e_s: float  # from dispatch

    def __init__(self, request: Request, replica_id: str, outcome: Outcome, usage: Usage | None, e2e_s: float) -> None:
        self.request = request
        self.replica_id = replica_id
        self.outcome = outcome
        self.usage = usage
        self.e2e_s = e2e_s


PolicyEvent: TypeAlias = FleetEvent | Dispatched | FirstToken | Completed
