"""The price of each part of a fleet: replicas of different models do not stand in for each other.

A group is the replicas that say they serve the same models; those that serve any are one group too. With one price for
all of them, what four models were asked for in all stood against what the replicas of one can do, and half of it was
refused by a fleet that was half idle. Requests for an adapter, or for one replica, belong to the group of these.
Trade-off: groups that overlap (a replica that serves two models, beside one that serves one of them) each count on
their whole pool; late refusals then lower what each believes.
"""

from __future__ import annotations

from policies.admission import SizeFairness
from policies.price import AT_FIRST, Price


class Prices:
    """By group; the fairness by size is that of all."""

    def __init__(self, fairness: SizeFairness) -> None:
        self.fairness = fairness
        self.by_group: dict[str, Price] = {}

    def of(self, group: str) -> Price:
        found = self.by_group.get(group)
        if found is None:
            found = self.by_group[group] = Price(self.fairness)
        return found

    def demand(self, now: float) -> float:
        """Prefill seconds per second that arrivals here asked for lately."""
        return sum([price.demand(now) for price in self.by_group.values()], 0.0)

    def lowest_factor(self) -> float:
        """On the capacity that the paces give, where most were late."""
        return min([price.factor for price in self.by_group.values()], default=AT_FIRST)

    def thresholds(self) -> dict[str, list[float | None]]:
        """In seconds by quartile of prompt length; None: no price."""
        return {
            group: [t if t < float("inf") else None for t in price.thresholds] for group, price in self.by_group.items()
        }
