"""dynamo_cost: NVIDIA Dynamo's KV router in approximate mode (--no-router-kv-events), all terms in blocks.

cost_i = scale max(0, (W_i + P) / b - credit d_i overlap_i) + decode_blocks_i, argmin, ties at random;
d_i = 1 / (1 + k (W_i - min W) / P), k = 0. W_i: prefill tokens active on i; P: prompt tokens; b: block size, 64
tokens here (one chunk); overlap_i: leading blocks sent there in the last 120 s; decode_blocks_i: KV tokens of our open
requests / b. Temperature 0. (lib/kv-router/src/scheduling; credit and scale 1.)
Trade-off: a block to prefill and a block held are not worth the same time, and the sum treats them so.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from policies.model import Choice, Dispatched, FleetView, PolicyEvent, Removed, Request, Restarted
from policies.parameters import parameter
from policies.policy import NONE_AVAILABLE
from policies.remembered import Remembered


@dataclass(frozen=True)
class DynamoParameters:
    block_tokens: float = parameter(64.0, 1.0, None, "tokens per block")
    prefill_scale: float = parameter(1.0, 0.0, None, "weight of prefill blocks")
    overlap_credit: float = parameter(1.0, 0.0, None, "weight of cached blocks")
    credit_decay: float = parameter(0.0, 0.0, None, "k: how fast credit decays on busy replicas")
    ttl_s: float = parameter(120.0, 0.0, None, "age at which a block is forgotten, seconds")
    capacity: int = parameter(1 << 20, 1, None, "blocks remembered per replica")


class DynamoCost:
    name = "dynamo_cost"

    def __init__(self, parameters: DynamoParameters, rng: Random) -> None:
        self._p = parameters
        self._rng = rng
        self._memory = Remembered(parameters.capacity, parameters.ttl_s)

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        p = self._p
        prompt = max(1.0, float(request.prompt_tokens))
        least_active = min(r.prefill_backlog_tokens for r in available)
        costs = []
        for replica in available:
            overlap = self._memory.matched(replica.id, request.chain, now)
            decay = 1.0 / (1.0 + p.credit_decay * (replica.prefill_backlog_tokens - least_active) / prompt)
            raw = (replica.prefill_backlog_tokens + request.prompt_tokens) / p.block_tokens
            prefill = max(0.0, raw - p.overlap_credit * decay * overlap)
            costs.append(p.prefill_scale * prefill + replica.kv_tokens / p.block_tokens)
        best = min(costs)
        chosen = self._rng.choice([r for r, c in zip(available, costs, strict=True) if c == best])
        return Choice(chosen.id, "load", tuple(zip([r.id for r in available], costs, strict=True)))

    def observe(self, event: PolicyEvent, now: float) -> None:
        if isinstance(event, Dispatched):
            self._memory.insert(event.replica_id, event.request.chain, now)
        elif isinstance(event, Removed | Restarted):
            self._memory.forget(event.replica_id)
