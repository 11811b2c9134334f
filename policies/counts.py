"""Rules that compare requests in flight: least_request over all replicas, power_of_two over a random pair.

Both read our own count, charged at the decision, so that a burst spreads. Ties are broken at random: several
gateways must not agree on the first replica of a list. least_request is KubeAI's LeastLoad and AIBrix's
least-request; power_of_two is Mitzenmacher's two choices with working counters (vllm-router's own reads a poll that
vLLM does not serve and degenerates to random, issues 174 to 178). Trade-off: a request is a request, whether 100
tokens or 100,000.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import ClassVar

from policies.model import Choice, FleetView, ReplicaView, Request
from policies.parameters import NoParameters
from policies.policy import NONE_AVAILABLE, Stateless


def fewest_in_flight(replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
    """The least of a non-empty sequence; ties at random."""
    fewest = min(r.in_flight for r in replicas)
    tied = [r for r in replicas if r.in_flight == fewest]
    return tied[0] if len(tied) == 1 else rng.choice(tied)


class LeastRequest(Stateless):
    name: ClassVar[str] = "least_request"
    blind: ClassVar[bool] = True

    def __init__(self, parameters: NoParameters, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        chosen = fewest_in_flight(available, self._rng)
        return Choice(chosen.id, "load", tuple([(r.id, float(r.in_flight)) for r in available]))


class PowerOfTwo(Stateless):
    name: ClassVar[str] = "power_of_two"
    blind: ClassVar[bool] = True

    def __init__(self, parameters: NoParameters, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        pair = available if len(available) < 3 else self._rng.sample(available, 2)
        chosen = fewest_in_flight(pair, self._rng)
        return Choice(chosen.id, "load", tuple([(r.id, float(r.in_flight)) for r in pair]))
