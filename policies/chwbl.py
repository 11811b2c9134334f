"""Consistent hashing with bounded loads: chwbl (KubeAI's rule), chwbl_work, and prefix_hash_256 (SMG's).

chwbl: key = adapter + first 100 characters; ring of 256 points per replica, xxh64(name + index); walk the *points*
clockwise and take the first replica with in_flight <= 1.25 (total + 1) / n (total 0: the first); none: the first
met. (internal/loadbalancer/balance_chwbl.go after PR 528. KubeAI takes the characters from the first user message;
here from the prompt text, or the first 256-byte chunk key where there is no text.) chwbl_work: the same key on
uhashring's ring, load = backlog in uncached tokens: the first with W_i <= 1.25 (sum W + u) / n. prefix_hash_256:
key = first 256 tokens (here 1024 characters, or chunk 4's key); the same bound; a loaded home is left for the least
loaded replica within the bound, not the next on the ring. Trade-off of all: one shallow key; prompts that share it
share a home. Source of the bound: Mirrokni et al., arXiv 1608.01350.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from xxhash import xxh64_intdigest

from policies.model import Choice, FleetView, ReplicaView, Request
from policies.parameters import parameter
from policies.policy import NONE_AVAILABLE, Stateless
from policies.ring import Ring


@dataclass(frozen=True)
class ChwblParameters:
    load_factor: float = parameter(1.25, 1.0, None, "a replica may carry this many times the mean load")
    points: int = parameter(256, 1, 4096, "points per replica on the ring")
    characters: int = parameter(100, 1, None, "characters of the prompt that make the key")


@dataclass(frozen=True)
class ChwblWorkParameters:
    load_factor: float = parameter(1.25, 1.0, None, "a replica may carry this many times the mean backlog")
    characters: int = parameter(100, 1, None, "characters of the prompt that make the key")


@dataclass(frozen=True)
class PrefixHashParameters:
    load_factor: float = parameter(1.25, 1.0, None, "a replica may carry this many times the mean load")
    points: int = parameter(150, 1, 4096, "points per replica on the ring")
    characters: int = parameter(1024, 1, None, "characters of the prompt that make the key; about 4 per token")


class PointRing:
    """Points of the replicas present; made again when the set changes."""

    def __init__(self, points: int) -> None:
        self._per_replica = points
        self._names: tuple[str, ...] = ()
        self._points: list[tuple[int, str]] = []

    def walk(self, key: int, replicas: Sequence[ReplicaView]) -> Iterator[str]:
        """Replica ids of every point clockwise from the key, once around (an id comes many times)."""
        names = tuple([r.id for r in replicas])
        if names != self._names:
            self._names = names
            self._points = sorted(
                (xxh64_intdigest(f"{name}{i}".encode()), name) for name in names for i in range(self._per_replica)
            )
        start = bisect_left(self._points, (key, ""))
        for _, name in self._points[start:]:
            yield name
        for _, name in self._points[:start]:
            yield name


def prefix_key(request: Request, characters: int, chunk: int) -> int:
    """Hash of adapter and first characters; without text, of adapter and the chunk key at that depth (or the last)."""
    adapter = request.adapter or ""
    if request.text is not None:
        return xxh64_intdigest((adapter + request.text()[:characters]).encode("utf-8", "surrogatepass"))
    key = request.chain[min(chunk, len(request.chain) - 1)] if request.chain else 0
    return xxh64_intdigest(f"{adapter}{key}".encode())


class Chwbl(Stateless):
    name = "chwbl"

    def __init__(self, parameters: ChwblParameters, rng: Random) -> None:
        self._p = parameters
        self._ring = PointRing(parameters.points)

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        accepted = self._accepted(request, available)
        first: str | None = None
        for replica_id in self._ring.walk(prefix_key(request, self._p.characters, 0), available):
            if replica_id in accepted:
                return Choice(replica_id, "affinity" if first in (None, replica_id) else "spill")
            first = first or replica_id
        return Choice(first, "affinity")

    def _accepted(self, request: Request, available: Sequence[ReplicaView]) -> set[str]:
        total = sum(r.in_flight for r in available)
        bound = self._p.load_factor * (total + 1) / len(available)
        return {r.id for r in available if total == 0 or r.in_flight <= bound}


class ChwblWork(Stateless):
    name = "chwbl_work"

    def __init__(self, parameters: ChwblWorkParameters, rng: Random) -> None:
        self._p = parameters
        self._ring = Ring()
        self._names: list[str] = []

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        names = [r.id for r in available]
        if names != self._names:
            self._names, self._ring = names, Ring()
            for name in names:
                self._ring.add(name)
        work = {r.id: r.prefill_backlog_tokens for r in available}
        own = min(r.uncached_tokens for r in available)
        key = prefix_key(request, self._p.characters, 0)
        chosen = self._ring.within(key, work, self._p.load_factor, self._p.load_factor * own / len(work))
        return Choice(chosen, "affinity" if chosen == self._ring.preference(key)[0] else "spill")


class PrefixHash256(Stateless):
    name = "prefix_hash_256"

    def __init__(self, parameters: PrefixHashParameters, rng: Random) -> None:
        self._p = parameters
        self._ring = PointRing(parameters.points)

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        home = next(self._ring.walk(prefix_key(request, self._p.characters, 3), available))
        total = sum(r.in_flight for r in available)
        bound = self._p.load_factor * (total + 1) / len(available)
        within = [r for r in available if total == 0 or r.in_flight <= bound]
        if not within or any(r.id == home for r in within):
            return Choice(home, "affinity")
        return Choice(min(within, key=lambda r: r.in_flight).id, "spill")
