"""A histogram that costs half a microsecond to feed; rendered in Prometheus form when it is scraped.

Fed once per stream with values in seconds or as a ratio. Same buckets and meaning as a Prometheus histogram; the
client library's own takes several times as long per value, and the budget of all records of a request is 10 us.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Distribution:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper, inclusive ends of the buckets, rising; above the last is one more."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(`le` label, count) as Prometheus wants it, `+Inf` last."""
        rows, seen = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            seen += count
            rows.append((bound, float(seen)))
        return rows
