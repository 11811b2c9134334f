"""Rules that look at nothing: the reference every other rule is compared with, and chance.

round_robin: a cursor over the available replicas in stable order (nginx, HAProxy, vllm-router, SMG). Equal counts,
whatever the requests cost. random: uniform; the same on average, with variance on top.
"""

from __future__ import annotations

from random import Random
from typing import ClassVar

from policies.model import Choice, FleetView, Request
from policies.parameters import NoParameters
from policies.policy import NONE_AVAILABLE, Stateless


class RoundRobin(Stateless):
    name: ClassVar[str] = "round_robin"
    blind: ClassVar[bool] = True

    def __init__(self, parameters: NoParameters, rng: Random) -> None:
        self._turn = 0

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        replica = available[self._turn % len(available)]
        self._turn += 1
        return Choice(replica.id, "turn")


class Uniform(Stateless):
    name: ClassVar[str] = "random"
    blind: ClassVar[bool] = True

    def __init__(self, parameters: NoParameters, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        return Choice(self._rng.choice(available).id, "random")
