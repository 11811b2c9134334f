"""peak_ewma: a latency that jumps up and decays slowly, times the requests waiting on it (Finagle, linkerd, tower).

cost_i = L_i (n_i + 1); a sample above L_i replaces it, one below moves it by 1 - exp(-age / tau), and L_i decays
between samples so that a replica that was slow is tried again. Unknown replicas start at 1 s. Defaults: tau 10 s as
in Finagle. The sample is TTFT: end-to-end time mostly measures how long the answer was. Trade-off: TTFT also
measures how long the prompt was, so mixed prompts look like noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from policies.model import Choice, Completed, FirstToken, FleetView, Outcome, PolicyEvent, Removed, Request, Restarted
from policies.parameters import parameter
from policies.policy import NONE_AVAILABLE, least


@dataclass(frozen=True)
class PeakEwmaParameters:
    tau_s: float = parameter(10.0, 0.001, None, "decay time of the latency estimate, seconds")
    initial_s: float = parameter(1.0, 0.0, None, "latency assumed of a replica that has not answered yet, seconds")


class PeakEwma:
    name = "peak_ewma"

    def __init__(self, parameters: PeakEwmaParameters, rng: Random) -> None:
        self._p = parameters
        self._latency: dict[str, tuple[float, float]] = {}  # seconds, as of

    def latency_s(self, replica_id: str, now: float) -> float:
        known = self._latency.get(replica_id)
        if known is None:
            return self._p.initial_s
        return known[0] * math.exp((known[1] - now) / self._p.tau_s)

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        costs = [self.latency_s(r.id, now) * (r.in_flight + 1) for r in available]
        chosen = available[least(available, costs)]
        return Choice(chosen.id, "load", tuple(zip([r.id for r in available], costs, strict=True)))

    def observe(self, event: PolicyEvent, now: float) -> None:
        match event:
            case FirstToken(replica_id=replica_id, ttft_s=sample):
                self._sample(replica_id, sample, now)
            case Completed(replica_id=replica_id, outcome=Outcome.ERROR, e2e_s=sample):
                # a fast error must not look like a fast replica
                self._sample(replica_id, max(sample, self.latency_s(replica_id, now)), now)
            case Removed(replica_id=replica_id) | Restarted(replica_id=replica_id):
                self._latency.pop(replica_id, None)
            case _:
                pass

    def _sample(self, replica_id: str, sample: float, now: float) -> None:
        known = self._latency.get(replica_id)
        if known is not None and sample < known[0]:
            keep = math.exp((known[1] - now) / self._p.tau_s)
            sample = known[0] * keep + sample * (1.0 - keep)
        self._latency[replica_id] = (sample, now)
