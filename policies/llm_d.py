"""The rules of llm-d's endpoint picker: weighted scorers (2:2:3 and 1:1:1) and sticky_until_saturated.

weighted: argmax w_q (maxQ - q) / (maxQ - minQ) + w_kv (1 - kv) + w_p matched / blocks, q = vLLM's waiting and kv =
its usage as scraped (unknown: 0), equal queues score 1, ties at random. `weighted`: chart default 2, 2, 3 (queue,
KV, prefix); `weighted_111`: Gateway API inference extension 1.0. sticky_until_saturated (prefix-cache-affinity
filter, then token load): keep replicas with match >= 0.80; if the best of them is predicted more than 18 s slower
than the best of the rest (uncached tokens in flight / 15,928 tokens/s), keep all; then argmin of uncached tokens in
flight + own uncached, over 4,194,304. Prefixes: blocks of 64 tokens (256 bytes here), 31,250 per replica.
Trade-off: min-max scores make a difference of one request look like saturation; weights fit one workload (1:1:1
gave TPOT p99 103 ms where 3:2:2 gave 63).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from policies.model import Choice, Dispatched, FleetView, PolicyEvent, Removed, ReplicaView, Request, Restarted
from policies.parameters import parameter
from policies.policy import NONE_AVAILABLE, least
from policies.remembered import Remembered


@dataclass(frozen=True)
class WeightedParameters:
    queue: float = parameter(2.0, 0.0, None, "weight of the engine's waiting requests")
    kv: float = parameter(2.0, 0.0, None, "weight of free KV")
    prefix: float = parameter(3.0, 0.0, None, "weight of the matched share of the prompt")
    capacity: int = parameter(31_250, 1, None, "blocks remembered per replica")


@dataclass(frozen=True)
class Weighted111Parameters(WeightedParameters):
    queue: float = parameter(1.0, 0.0, None, "weight of the engine's waiting requests")
    kv: float = parameter(1.0, 0.0, None, "weight of free KV")
    prefix: float = parameter(1.0, 0.0, None, "weight of the matched share of the prompt")


@dataclass(frozen=True)
class StickyParameters:
    threshold: float = parameter(0.80, 0.0, 1.0, "matched share from which a replica is sticky")
    max_penalty_s: float = parameter(18.0, 0.0, None, "predicted extra wait that breaks stickiness, seconds")
    prefill_rate: float = parameter(15_928.0, 1.0, None, "peak prefill throughput assumed, tokens/s")
    capacity: int = parameter(31_250, 1, None, "blocks remembered per replica")


class _Blocks:
    """Prefixes as the picker's approximate producer keeps them."""

    def __init__(self, capacity: int) -> None:
        self._memory = Remembered(capacity)

    def share(self, replica: ReplicaView, request: Request, now: float) -> float:
        """Leading blocks present, as a share of the prompt's."""
        chain = request.chain
        return self._memory.matched(replica.id, chain, now) / len(chain) if chain else 0.0

    def observe(self, event: PolicyEvent, now: float) -> None:
        if isinstance(event, Dispatched):
            self._memory.insert(event.replica_id, event.request.chain, now)
        elif isinstance(event, Removed | Restarted):
            self._memory.forget(event.replica_id)


class Weighted(_Blocks):
    name = "weighted"

    def __init__(self, parameters: WeightedParameters, rng: Random) -> None:
        super().__init__(parameters.capacity)
        self._p = parameters
        self._rng = rng

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        waiting = [(r.scraped.waiting or 0.0) if r.scraped else 0.0 for r in available]
        most, spread = max(waiting), max(waiting) - min(waiting)
        scores = []
        for replica, q in zip(available, waiting, strict=True):
            kv = (replica.scraped.kv_usage or 0.0) if replica.scraped else 0.0
            queue = (most - q) / spread if spread else 1.0
            prefix = self.share(replica, request, now)
            scores.append(self._p.queue * queue + self._p.kv * (1.0 - kv) + self._p.prefix * prefix)
        best = max(scores)
        chosen = self._rng.choice([r for r, s in zip(available, scores, strict=True) if s == best])
        return Choice(chosen.id, "load", tuple([(r.id, -s) for r, s in zip(available, scores, strict=True)]))


class Weighted111(Weighted):
    name = "weighted_111"


class StickyUntilSaturated(_Blocks):
    name = "sticky_until_saturated"

    def __init__(self, parameters: StickyParameters, rng: Random) -> None:
        super().__init__(parameters.capacity)
        self._p = parameters

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        shares = {r.id: self.share(r, request, now) for r in available}
        sticky = [r for r in available if shares[r.id] >= self._p.threshold]
        others = [r for r in available if shares[r.id] < self._p.threshold]
        kept, reason = (sticky, "affinity") if sticky else (others, "cold")
        if sticky and others:
            best, rest = (min(r.prefill_backlog_tokens for r in group) for group in (sticky, others))
            if (best - rest) / self._p.prefill_rate > self._p.max_penalty_s:
                kept, reason = available, "spill"
        scores = [r.prefill_backlog_tokens + (1.0 - shares[r.id]) * request.prompt_tokens for r in kept]
        chosen = kept[least(kept, scores)]
        return Choice(chosen.id, reason, tuple(zip([r.id for r in kept], scores, strict=True)))
