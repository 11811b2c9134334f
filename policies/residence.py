"""How long a cached prefix stays on a replica: what fills its KV cache, whoever sends it.

Blocks of finished requests are freed least recently used first, so what nobody used for T = room / fill is gone, with
room = the part of the cache that live requests do not hold, and fill = tokens that were computed and not found there,
plus tokens generated, a second. All are in the engine's own metrics, so all gateways' traffic is in them. Measured
(simulated chat at three times the load, two gateways, 4,600 later turns): half of what nobody used for 0.8 to 0.9 T is
gone, 1 % after half of T. Trade-offs: a hit takes what is freed out of that order, so T is a little long. What live
requests hold is not freed at all, and counts as gone all the same when nobody began with it for T; so T is never below
a quarter of what the whole cache gives, or nothing would be believed of an engine that is full of live requests.
"""

from __future__ import annotations

import math

from policies.model import Scraped

MEMORY_S = 30.0
LEAST_ROOM = 0.25  # of the cache


class Residence:
    """Of one replica; fed by its scrapes."""

    __slots__ = ("_at", "_filled", "fill_tokens_s", "used")

    def __init__(self) -> None:
        self._at: float | None = None
        self._filled = 0.0
        self.fill_tokens_s: float | None = None  # None: not known yet
        self.used = 0.0  # share of the cache that live requests hold

    def scraped(self, seen: Scraped) -> None:
        if seen.prefix_queries is None or seen.prefix_hits is None:
            return
        filled = seen.prefix_queries - seen.prefix_hits + (seen.generation_tokens or 0.0)
        before, self._at = self._at, seen.at
        gained, self._filled = filled - self._filled, filled
        if before is None or gained < 0.0 or seen.at <= before:  # the first, or a restart
            return
        rate, keep = gained / (seen.at - before), math.exp((before - seen.at) / MEMORY_S)
        used = seen.kv_usage or 0.0
        if self.fill_tokens_s is None:
            self.fill_tokens_s, self.used = rate, used
        else:
            self.fill_tokens_s = keep * self.fill_tokens_s + (1.0 - keep) * rate
            self.used = keep * self.used + (1.0 - keep) * used

    def seconds(self, capacity_tokens: float | None) -> float:
        """Infinite while it is not known, or nothing fills it."""
        if capacity_tokens is None or not self.fill_tokens_s:
            return math.inf
        return max(LEAST_ROOM, 1.0 - self.used) * capacity_tokens / self.fill_tokens_s
