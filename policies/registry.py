"""The names by which policies are chosen, what each is in one line, and how it is made from settings.

Adding a policy is one file, one line in `_specs` and one test with hand-worked expectations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from policies.blind import RoundRobin, Uniform
from policies.counts import LeastRequest, PowerOfTwo
from policies.parameters import NoParameters, read
from policies.policy import RoutingPolicy


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One entry of `POLICIES`."""

    name: str
    about: str  # one line for --help
    parameters: type[Any]  # dataclass of its settings
    build: Callable[[Any, Random], RoutingPolicy]

    def make(self, settings: Mapping[str, Any] | None, rng: Random) -> RoutingPolicy:
        """A fresh policy; ValueError names a wrong setting, its value and what would be right."""
        return self.build(read(self.name, self.parameters, settings), rng)


def _specs() -> list[PolicySpec]:
    none = NoParameters
    return [
        PolicySpec("round_robin", "each available replica in turn; the reference", none, lambda p, rng: RoundRobin()),
        PolicySpec("random", "uniform over the available replicas", none, lambda p, rng: Uniform(rng)),
        PolicySpec("least_request", "fewest requests in flight", none, lambda p, rng: LeastRequest(rng)),
        PolicySpec("power_of_two", "fewer in flight of two drawn at random", none, lambda p, rng: PowerOfTwo(rng)),
    ]


POLICIES: dict[str, PolicySpec] = {spec.name: spec for spec in _specs()}


def make(name: str, settings: Mapping[str, Any] | None = None, rng: Random | None = None) -> RoutingPolicy:
    """Build the policy `name` with its own settings and source of chance (seed 0 if none is given)."""
    spec = POLICIES.get(name)
    if spec is None:
        raise ValueError(f"policy {name!r} is unknown; known: {', '.join(sorted(POLICIES))}")
    return spec.make(settings, rng if rng is not None else Random(0))
