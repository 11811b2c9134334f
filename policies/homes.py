"""Where a prefix lives before anyone has it: its affinity key, its preference list, and how many of it are homes.

Affinity key: the shallowest of depths 1, 4, 16, 64, 256 chunks at which the prefix's decayed share of requests is
at most (1 + 0.25) / N. A system prompt that everybody shares is skipped, the key moves into what separates
conversations, and all below it still lands together; a chain too short to separate is keyed by its last chunk.
Homes: the first m of the key's ring order. m covers its work, ceil(work seconds per second / 0.6), plus one per
spill (at most one per 2 s), and gives one back per 60 s without a spill; so a hot prefix has a stable set of
replicas on which several gateways agree without talking. Failover follows the same list. Trade-off: shares need
some requests to be known; until then (prior of 2 N requests) keys are shallow and conversations start together.
Sources: consistent hashing with bounded loads (arXiv 1608.01350); two hash candidates per prefix (DualMap,
2602.06502).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

from mypy_extensions import mypyc_attr
from xxhash import xxh3_64_intdigest

from policies.ring import Ring

DEPTHS: Final = (1, 4, 16, 64, 256)


class Placement(NamedTuple):
    """A key's preference list: `order[:homes]` are its homes. Empty for a request without any identity."""

    key: int | None
    order: tuple[str, ...] = ()
    homes: int = 1


NOWHERE = Placement(None)


@mypyc_attr(acyclic=True)
class _Heat:
    """How hard one key is used."""

    __slots__ = ("at", "extra", "grown_at", "work_s")

    def __init__(self, now: float) -> None:
        self.at = now
        self.work_s = 0.0  # decayed seconds of work over the memory
        self.extra = 0  # homes added by spills
        self.grown_at = -math.inf


class _Shares:
    """Decayed request counts in two generations: the older counts half, and turning them is O(1)."""

    def __init__(self, period_s: float, most: int) -> None:
        self._period_s, self._most = period_s, most
        self.young: dict[int, int] = {}
        self.old: dict[int, int] = {}
        self._young_total = self._old_total = 0
        self._turned_at = -math.inf

    def add(self, chain: tuple[int, ...], now: float) -> None:
        if now - self._turned_at > self._period_s or len(self.young) > self._most:
            self.old, self._old_total = self.young, self._young_total
            self.young, self._young_total, self._turned_at = {}, 0, now
        young, length = self.young, len(chain)
        for depth in DEPTHS:
            if depth > length:
                break
            key = chain[depth - 1]
            young[key] = young.get(key, 0) + 1
        self._young_total += 1

    def separates(self, chain: tuple[int, ...], parts: int, slack: float) -> int:
        """The first key of a chain that is asked for at most `slack` times as often as an equal part of all counted
        (and a prior of two for each part); its last where none is."""
        most = slack * (self._young_total + 0.5 * self._old_total + 2.0 * parts) / parts
        young, old, length = self.young, self.old, len(chain)
        for depth in DEPTHS:
            if depth > length:
                break
            key = chain[depth - 1]
            if young.get(key, 0) + 0.5 * old.get(key, 0) <= most:
                return key
        return chain[-1]


class Homes:
    """Placement of prefixes over the replicas of one ring."""

    EPS = 0.25
    FULL = 0.6  # share of a replica's time one home should spend on one key
    GROW_EVERY_S = 2.0
    SHRINK_AFTER_S = 60.0
    MEMORY_S = 30.0
    MOST_KEYS = 65_536

    def __init__(self) -> None:
        self.ring = Ring()
        self._shares = _Shares(60.0, self.MOST_KEYS)
        self._heat: dict[int, _Heat] = {}
        self._order: deque[int] = deque()  # its keys, the first that came first

    def place(self, chain: tuple[int, ...], session: str | None, now: float, adapter: str | None = None) -> Placement:
        """The preference list of a request. O(1) in replicas and in what is known.

        An adapter's requests share the adapter's list: loading it again elsewhere costs more than a cold prefix.
        """
        return self.at(self.key(chain, session, adapter), now)

    def at(self, key: int | None, now: float) -> Placement:
        """The preference list of a key."""
        return NOWHERE if key is None else Placement(key, self.ring.preference(key), self.homes(key, now))

    def key(self, chain: tuple[int, ...], session: str | None = None, adapter: str | None = None) -> int | None:
        """Affinity key of a chain (see above); without a chain the session's hash; else None."""
        if adapter is not None:
            return xxh3_64_intdigest(adapter.encode())
        if not chain:
            return None if session is None else xxh3_64_intdigest(session.encode())
        return self._shares.separates(chain, len(self.ring.weights) or 1, 1.0 + self.EPS)

    def seen(self, chain: tuple[int, ...], now: float) -> None:
        """Count one request towards the shares of its prefixes."""
        self._shares.add(chain, now)

    def homes(self, key: int, now: float) -> int:
        """m of this key now, from 1 to the number of replicas."""
        heat = self._heat.get(key)
        if heat is None:
            return 1
        self._cool(heat, now)
        needed = math.ceil(heat.work_s / self.MEMORY_S / self.FULL)
        wanted = (needed if needed > 1 else 1) + heat.extra
        most = len(self.ring.weights)
        return wanted if wanted < most else max(1, most)

    def used(self, key: int, work_s: float, now: float) -> None:
        """A request under this key was dispatched and costs `work_s` seconds of prefill."""
        heat = self._warm(key, now)
        heat.work_s += work_s

    def spilled(self, key: int, now: float) -> None:
        """A request left the homes of its key because they were too busy."""
        heat = self._warm(key, now)
        if now - heat.grown_at >= self.GROW_EVERY_S:
            heat.extra = min(heat.extra + 1, max(0, len(self.ring) - 1))
            heat.grown_at = now

    def _warm(self, key: int, now: float) -> _Heat:
        heat = self._heat.get(key)
        if heat is None:
            if len(self._heat) >= self.MOST_KEYS:
                del self._heat[self._order.popleft()]
            heat = self._heat[key] = _Heat(now)
            self._order.append(key)
        if now > heat.at + 1.0 or heat.extra:
            self._cool(heat, now)
        return heat

    def _cool(self, heat: _Heat, now: float) -> None:
        if now > heat.at + 1.0:  # a second of a memory of thirty: not worth an exp per request
            heat.work_s *= math.exp((heat.at - now) / self.MEMORY_S)
            heat.at = now
        while heat.extra and now - heat.grown_at >= self.SHRINK_AFTER_S:
            heat.extra -= 1
            heat.grown_at += self.SHRINK_AFTER_S
