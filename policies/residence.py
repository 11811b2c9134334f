"""How long a cached prefix stays on a replica: what fills its KV cache, whoever sends it.

Blocks of finished requests are freed least recently used first, so what nobody used for T = capacity / fill is gone,
with fill = tokens that were computed and not found there, plus tokens generated, a second. Both are counters of the
engine's own metrics, so all gateways' traffic is in them. Trade-off: what is in use now takes room as well and is not
subtracted, so T is a little long.
"""

from __future__ import annotations

import math

from policies.model import Scraped

MEMORY_S = 30.0


class Residence:
    """Of one replica; fed by its scrapes."""

    __slots__ = ("_at", "_filled", "fill_tokens_s")

    def __init__(self) -> None:
        self._at: float | None = None
        self._filled = 0.0
        self.fill_tokens_s: float | None = None  # None: not known yet

    def scraped(self, seen: Scraped) -> None:
        if seen.prefix_queries is None or seen.prefix_hits is None:
            return
        filled = seen.prefix_queries - seen.prefix_hits + (seen.generation_tokens or 0.0)
        before, self._at = self._at, seen.at
        gained, self._filled = filled - self._filled, filled
        if before is None or gained < 0.0 or seen.at <= before:  # the first, or a restart
            return
        rate, keep = gained / (seen.at - before), math.exp((before - seen.at) / MEMORY_S)
        self.fill_tokens_s = rate if self.fill_tokens_s is None else keep * self.fill_tokens_s + (1.0 - keep) * rate

    def seconds(self, capacity_tokens: float | None) -> float:
        """Infinite while it is not known, or nothing fills it."""
        if capacity_tokens is None or not self.fill_tokens_s:
            return math.inf
        return capacity_tokens / self.fill_tokens_s
