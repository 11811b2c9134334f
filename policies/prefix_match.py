"""Rules on a remembered prefix and a count: prefix_trie, loadaware (production-stack), aibrix_prefix (AIBrix).

prefix_trie: the deepest set of replicas that saw the same leading 128-character chunks, a *random* one of it; a
total miss is random over all. No load term; no eviction there (a leak, issues 687 and 711), an LRU cap here.
loadaware: argmax matched / prompt - beta (n_i - mean) / max(1, mean), beta 1 (PR 1035). aibrix_prefix: if max - min
in flight > 8: random among the least loaded. Else by match % descending, load ascending, the first with load <=
mean + 1 standard deviation; none: the least loaded (prefix_cache.go; blocks of 4 bytes and 20 min there, chunks of
256 bytes and 20 min here). Trade-off: a share of the prompt says nothing about how many tokens it saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import fmean, pstdev

from policies.counts import fewest_in_flight
from policies.model import Choice, Dispatched, FleetView, PolicyEvent, Removed, Request, Restarted
from policies.parameters import parameter
from policies.policy import NONE_AVAILABLE, least
from policies.remembered import Remembered, block_keys


@dataclass(frozen=True)
class PrefixTrieParameters:
    characters: int = parameter(128, 1, None, "characters per chunk")
    capacity: int = parameter(200_000, 1, None, "chunks remembered per replica (an addition: there is no limit there)")


@dataclass(frozen=True)
class LoadAwareParameters:
    beta: float = parameter(1.0, 0.0, None, "weight of relative load against the matched share")
    characters: int = parameter(128, 1, None, "characters per chunk")
    capacity: int = parameter(200_000, 1, None, "chunks remembered per replica")


@dataclass(frozen=True)
class AibrixParameters:
    imbalance: int = parameter(8, 0, None, "requests between most and least loaded that turn affinity off")
    deviations: float = parameter(1.0, 0.0, None, "a match may be above the mean load by so many standard deviations")
    capacity: int = parameter(200_000, 1, None, "blocks remembered per replica")
    ttl_s: float = parameter(1200.0, 0.0, None, "age at which a block is forgotten, seconds")


class _Remembering:
    """Feeds what is dispatched into the memory."""

    def __init__(self, capacity: int, ttl_s: float | None, characters: int | None) -> None:
        self._memory = Remembered(capacity, ttl_s)
        self._characters = characters

    def keys(self, request: Request) -> list[int]:
        return list(request.chain if self._characters is None else block_keys(request, self._characters))

    def observe(self, event: PolicyEvent, now: float) -> None:
        if isinstance(event, Dispatched):
            self._memory.insert(event.replica_id, self.keys(event.request), now)
        elif isinstance(event, Removed | Restarted):
            self._memory.forget(event.replica_id)


class PrefixTrie(_Remembering):
    name = "prefix_trie"

    def __init__(self, parameters: PrefixTrieParameters, rng: Random) -> None:
        super().__init__(parameters.capacity, None, parameters.characters)
        self._rng = rng

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        keys = self.keys(request)
        matches = [self._memory.matched(r.id, keys, now) for r in available]
        deepest = max(matches)
        chosen = self._rng.choice([r for r, m in zip(available, matches, strict=True) if m == deepest])
        return Choice(chosen.id, "affinity" if deepest else "random")


class LoadAware(_Remembering):
    name = "loadaware"

    def __init__(self, parameters: LoadAwareParameters, rng: Random) -> None:
        super().__init__(parameters.capacity, None, parameters.characters)
        self._beta = parameters.beta

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        keys = self.keys(request)
        mean = fmean(r.in_flight for r in available)
        scores = [
            self._beta * (r.in_flight - mean) / max(1.0, mean)
            - self._memory.matched(r.id, keys, now) / max(1, len(keys))
            for r in available
        ]
        chosen = available[least(available, scores)]
        return Choice(chosen.id, "load", tuple(zip([r.id for r in available], scores, strict=True)))


class AibrixPrefix(_Remembering):
    name = "aibrix_prefix"

    def __init__(self, parameters: AibrixParameters, rng: Random) -> None:
        super().__init__(parameters.capacity, parameters.ttl_s, None)
        self._p = parameters
        self._rng = rng

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        loads = [r.in_flight for r in available]
        if max(loads) - min(loads) > self._p.imbalance:
            return Choice(fewest_in_flight(available, self._rng).id, "load")
        keys = self.keys(request)
        matches = {r.id: self._memory.matched(r.id, keys, now) for r in available}
        limit = fmean(loads) + self._p.deviations * pstdev(loads)
        for replica in sorted(available, key=lambda r: (-matches[r.id], r.in_flight)):
            if matches[replica.id] and replica.in_flight <= limit:
                return Choice(replica.id, "affinity")
        return Choice(fewest_in_flight(available, self._rng).id, "load")
