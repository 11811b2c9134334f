"""Sums of the last hour, without keeping what they are made of: each value fades with e^(-age / 1 h).

A steady stream of rate r sums up to r x 1 h x (1 - e^(-T / 1 h)) after a time T, which is how a rate is read off before
an hour has passed. Trade-off: an hour that ended still counts a little, for two numbers instead of a ring of buckets.
"""

from __future__ import annotations

from math import exp

HOUR_S = 3600.0


class Flow:
    """Several quantities that fade together. `since`: when counting began."""

    __slots__ = ("_at", "since", "sums")

    def __init__(self, quantities: int, now: float) -> None:
        self.sums = [0.0] * quantities
        self.since = self._at = now

    def add(self, now: float, *values: float) -> None:
        """One value per quantity, in their order."""
        self.fade(now)
        for i, value in enumerate(values):
            self.sums[i] += value

    def fade(self, now: float) -> None:
        if now > self._at:
            factor = exp((self._at - now) / HOUR_S)
            self.sums = [factor * value for value in self.sums]
            self._at = now

    def per_hour(self, now: float) -> list[float]:
        self.fade(now)
        seen = max(1.0, now - self.since) / HOUR_S
        return [value / (1.0 - exp(-seen)) for value in self.sums]
