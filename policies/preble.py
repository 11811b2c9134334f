"""preble: E2 scheduling, exploit a prefix that is longer than the rest of the prompt, else explore (arXiv 2407.00023).

If the matched part is longer than the unmatched: among the replicas that hold the longest match, the one of least
cost; else least cost over all. cost_i = prefill seconds sent there in the last 3 minutes + n_i x median output x
median TPOT + eviction: prefill seconds of what would have to leave. Median output 45 tokens, TPOT 0.15 s until
measured, as in its port to AIBrix. Left out: moving subtrees when the heaviest replica has 1.5 times the lightest's
load, and its offline-fitted prefill time (here uncached tokens over the learnt rate). Trade-off: a three-minute
window reacts in minutes; a long window of past work is not what waits now.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random

from policies.model import Choice, Completed, Dispatched, FleetView, PolicyEvent, Removed, ReplicaView, Request
from policies.parameters import parameter
from policies.policy import NONE_AVAILABLE, least


@dataclass(frozen=True)
class PrebleParameters:
    window_s: float = parameter(180.0, 1.0, None, "window of past prefill work, seconds")
    output_tokens: float = parameter(45.0, 1.0, None, "output assumed until measured")
    tpot_s: float = parameter(0.15, 0.0, None, "time per output token assumed until predicted, seconds")


class Preble:
    name = "preble"

    def __init__(self, parameters: PrebleParameters, rng: Random) -> None:
        self._p = parameters
        self._sent: dict[str, deque[tuple[float, float]]] = {}  # replica -> (when, prefill seconds)
        self._work_s: dict[str, float] = {}
        self._outputs: deque[int] = deque(maxlen=101)
        self._next: tuple[str, dict[str, float]] = ("", {})  # prefill seconds of the request just chosen for

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        longest = max(r.cached_tokens for r in available)
        exploit = longest > request.prompt_tokens - longest
        kept = [r for r in available if r.cached_tokens == longest] if exploit else available
        costs = [self._cost_s(r, now) for r in kept]
        chosen = kept[least(kept, costs)]
        self._next = (request.id, {r.id: r.uncached_tokens / r.prefill_rate for r in available})
        return Choice(
            chosen.id, "affinity" if exploit else "cold", tuple(zip([r.id for r in kept], costs, strict=True))
        )

    def _cost_s(self, replica: ReplicaView, now: float) -> float:
        sent = self._sent.get(replica.id)
        while sent and sent[0][0] < now - self._p.window_s:
            self._work_s[replica.id] -= sent.popleft()[1]
        output = sorted(self._outputs)[len(self._outputs) // 2] if self._outputs else self._p.output_tokens
        tpot = replica.predicted_tpot_s or self._p.tpot_s
        evicted = 0.0
        if replica.kv_free_tokens is not None:
            evicted = max(0.0, replica.uncached_tokens - replica.kv_free_tokens) / replica.prefill_rate
        return self._work_s.get(replica.id, 0.0) + replica.in_flight * output * tpot + evicted

    def observe(self, event: PolicyEvent, now: float) -> None:
        match event:
            case Dispatched(request=request, replica_id=replica_id):
                work = self._next[1].get(replica_id, 0.0) if self._next[0] == request.id else 0.0
                self._sent.setdefault(replica_id, deque()).append((now, work))
                self._work_s[replica_id] = self._work_s.get(replica_id, 0.0) + work
            case Completed(usage=usage) if usage is not None and usage.completion_tokens:
                self._outputs.append(usage.completion_tokens)
            case Removed(replica_id=replica_id):
                self._sent.pop(replica_id, None)
                self._work_s.pop(replica_id, None)
            case _:
                pass
