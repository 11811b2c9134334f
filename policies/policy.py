"""What a routing policy is: one pure choice, plus an optional ear for events.

`choose` sees only available replicas worth considering through `fleet` (unavailable ones are in the view,
marked), never raises for an empty fleet, costs O(replicas) and is deterministic given its inputs and
the `random.Random` it was built with. Stateless rules inherit the no-op `observe`.
A policy that is `blind` (reads ids, roles, availability and counts in flight, nothing else) is decided in a fast lane
where requests are sent at once: no prefix look, prediction, alternatives or learning, for a tenth of the cost.
One that is `adapters_only` is not told of requests without an adapter: they would mean nothing to it.
Trade-off: the core then knows nothing of caches and rates, and starts to learn them when another policy is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from policies.model import Choice, FleetView, PolicyEvent, ReplicaView, Request

NONE_AVAILABLE = Choice(None, "none_available")


class RoutingPolicy(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice: ...

    def observe(self, event: PolicyEvent, now: float) -> None: ...


class Stateless:
    """Base of the rules that need no events. `blind`: reads no more of a view than id, availability, in flight."""

    name: ClassVar[str] = "stateless"
    blind: ClassVar[bool] = False

    def observe(self, event: PolicyEvent, now: float) -> None:
        return None


def listens(policy: RoutingPolicy) -> bool:
    """Whether events mean anything to it."""
    return getattr(type(policy), "observe", None) is not Stateless.observe


def least(replicas: Sequence[ReplicaView], scores: Sequence[float]) -> int:
    """Index of the smallest score; the first of equals. -1 for an empty sequence."""
    best, at = float("inf"), -1
    for i, score in enumerate(scores):
        if score < best:
            best, at = score, i
    return at
