"""cache_aware (SGLang, SMG, vllm-router) and ray_prefix (Ray Serve LLM): a text tree with a fleet-wide gate on
imbalance.

cache_aware: imbalanced when max - min in flight > abs and max > rel x min: then the least loaded replica (still
inserted). Else if matched / length > threshold: the deepest node's latest tenant; else the least loaded. Parameter
sets: command line 0.3 / 64 / 1.5 with 2^26 characters per replica (`cache_aware`), library 0.5 / 32 / 1.1 with
10,000 (`cache_aware_library`). An unavailable holder: the first available, as there. Eviction runs every
eviction_interval_s. ray_prefix: max - min > imbalanced_threshold (infinite in code, 10 in its docs): power of two.
Else match < 10 %: replicas with fewest characters; else those of the longest match; fewest in flight among them. No
eviction there; capped here. Trade-off of both: one hot replica turns affinity off for everybody, and diverting
under saturation makes hits collapse (vllm-router 238, sglang 32195); on small fleets abs 64 is never reached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from policies.counts import fewest_in_flight
from policies.model import Choice, Dispatched, FleetView, PolicyEvent, Removed, Request, Restarted
from policies.parameters import parameter
from policies.policy import NONE_AVAILABLE
from policies.text_tree import TextTree, prompt_of


@dataclass(frozen=True)
class CacheAwareParameters:
    cache_threshold: float = parameter(0.3, 0.0, 1.0, "share of the prompt that must match")
    balance_abs_threshold: int = parameter(64, 0, None, "requests between most and least loaded")
    balance_rel_threshold: float = parameter(1.5, 1.0, None, "ratio of most to least loaded")
    max_tree_size: int = parameter(1 << 26, 1, None, "characters kept per replica")
    eviction_interval_s: float = parameter(120.0, 0.0, None, "seconds between evictions")


@dataclass(frozen=True)
class CacheAwareLibraryParameters(CacheAwareParameters):
    cache_threshold: float = parameter(0.5, 0.0, 1.0, "share of the prompt that must match")
    balance_abs_threshold: int = parameter(32, 0, None, "requests between most and least loaded")
    balance_rel_threshold: float = parameter(1.1, 1.0, None, "ratio of most to least loaded")
    max_tree_size: int = parameter(10_000, 1, None, "characters kept per replica")
    eviction_interval_s: float = parameter(30.0, 0.0, None, "seconds between evictions")


@dataclass(frozen=True)
class RayPrefixParameters:
    imbalanced_threshold: float = parameter(math.inf, 0.0, None, "requests between most and least loaded; inf: never")
    match_rate_threshold: float = parameter(0.10, 0.0, 1.0, "share of the prompt that must match")
    max_tree_size: int = parameter(1 << 26, 1, None, "characters kept per replica")
    eviction_interval_s: float = parameter(120.0, 0.0, None, "seconds between evictions")


class _TreeKeeper:
    """Trees per model, fed by dispatches."""

    def __init__(self, max_tree_size: int, eviction_interval_s: float) -> None:
        self._trees: dict[str, TextTree] = {}
        self._most = max_tree_size
        self._interval_s = eviction_interval_s
        self._evicted_at: float | None = None

    def tree(self, request: Request) -> TextTree:
        return self._trees.setdefault(request.adapter or request.model, TextTree())

    def observe(self, event: PolicyEvent, now: float) -> None:
        if isinstance(event, Dispatched):
            self.tree(event.request).insert(prompt_of(event.request), event.replica_id)
            if self._evicted_at is None:
                self._evicted_at = now
            if now - self._evicted_at >= self._interval_s:
                self._evicted_at = now
                for tree in self._trees.values():
                    tree.evict(self._most)
        elif isinstance(event, Removed | Restarted):
            for tree in self._trees.values():
                tree.remove(event.replica_id)


class CacheAware(_TreeKeeper):
    name = "cache_aware"

    def __init__(self, parameters: CacheAwareParameters, rng: Random) -> None:
        super().__init__(parameters.max_tree_size, parameters.eviction_interval_s)
        self._p = parameters

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        loads = [r.in_flight for r in available]
        least_loaded = available[loads.index(min(loads))]
        imbalanced = max(loads) - min(loads) > self._p.balance_abs_threshold
        if imbalanced and max(loads) > self._p.balance_rel_threshold * min(loads):
            return Choice(least_loaded.id, "load")
        prompt = prompt_of(request)
        matched, _, tenant = self.tree(request).match(prompt)
        if tenant is None or matched <= self._p.cache_threshold * len(prompt):
            return Choice(least_loaded.id, "cold")
        if any(r.id == tenant for r in available):
            return Choice(tenant, "affinity")
        return Choice(available[0].id, "spill")


class CacheAwareLibrary(CacheAware):
    name = "cache_aware_library"


class RayPrefix(_TreeKeeper):
    name = "ray_prefix"

    def __init__(self, parameters: RayPrefixParameters, rng: Random) -> None:
        super().__init__(parameters.max_tree_size, parameters.eviction_interval_s)
        self._p = parameters
        self._rng = rng

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        loads = [r.in_flight for r in available]
        if max(loads) - min(loads) > self._p.imbalanced_threshold:
            pair = available if len(available) < 3 else self._rng.sample(available, 2)
            return Choice(fewest_in_flight(pair, self._rng).id, "load")
        prompt, tree = prompt_of(request), self.tree(request)
        matched, tenants, _ = tree.match(prompt)
        holders = [r for r in available if r.id in tenants]
        if holders and prompt and matched / len(prompt) >= self._p.match_rate_threshold:
            return Choice(fewest_in_flight(holders, self._rng).id, "affinity")
        fewest = min(tree.owned(r.id) for r in available)
        return Choice(fewest_in_flight([r for r in available if tree.owned(r.id) == fewest], self._rng).id, "cold")
