"""Rules that compare work in tokens: least_work (LPWL) and lmetric.

W_i: uncached tokens dispatched to i and not yet prefilled; u_i: this request's uncached tokens there; n_i: in
flight. least_work: argmin W_i + u_i, ties by fewest in flight, then by turn (lab notes gahow/agentic-kvc: best TTFT
p90 of a coding-agent trace in closed loop). Blind to decode and KV: long answers crowd. lmetric: argmin (W_i + u_i)
n_i, "new prefill tokens times batch size" (arXiv 2603.15202), no weights. With n_i = 0 every prompt costs nothing
there; Dynamo's (n_i + 1) closes that hole and is the default here (`plus_one`). The product lets an idle cold
replica beat a busy warm one: 2,500 tokens x 5 requests lose to 10,000 x 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from policies.model import Choice, FleetView, Request
from policies.parameters import NoParameters, parameter
from policies.policy import NONE_AVAILABLE, Stateless, least


@dataclass(frozen=True)
class LmetricParameters:
    plus_one: bool = parameter(True, about="count this request in the batch, so that an empty batch is not free")


class LeastWork(Stateless):
    name = "least_work"

    def __init__(self, parameters: NoParameters, rng: Random) -> None:
        self._turn = 0

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        scores = [r.prefill_backlog_tokens + r.uncached_tokens for r in available]
        smallest = min(scores)
        tied = [r for r, score in zip(available, scores, strict=True) if score == smallest]
        if len(tied) > 1:
            fewest = min(r.in_flight for r in tied)
            tied = [r for r in tied if r.in_flight == fewest]
            self._turn += 1
        chosen = tied[self._turn % len(tied)]
        reason = "affinity" if chosen.cached_tokens > 0 else "load"
        return Choice(chosen.id, reason, tuple(zip([r.id for r in available], scores, strict=True)))


class Lmetric(Stateless):
    name = "lmetric"

    def __init__(self, parameters: LmetricParameters, rng: Random) -> None:
        self._extra = 1 if parameters.plus_one else 0

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        scores = [(r.prefill_backlog_tokens + r.uncached_tokens) * (r.in_flight + self._extra) for r in available]
        chosen = available[least(available, scores)]
        reason = "affinity" if chosen.cached_tokens > 0 else "load"
        return Choice(chosen.id, reason, tuple(zip([r.id for r in available], scores, strict=True)))
