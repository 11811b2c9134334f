"""What a hand decides by itself while no core answers: least of its own requests in flight, over the last known fleet.

It knows no queue, no prefix and no load but its own, so it holds nothing and refuses nothing but what nobody serves.
A replica that refused just now is left out for a moment. Trade-off: worse than the core in every way but one, that it
is there; a core is back within a second.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count

from gateway.mirror import Mirror
from policies.model import Dispatch, Request, Shed

RETRY_AFTER_S = 1.0


class Fallback:
    def __init__(self, fleet: Mirror) -> None:
        self._fleet = fleet
        self._turn = count()
        self.in_flight: dict[str, int] = {}

    def decide(self, request: Request, tried: Collection[str]) -> Dispatch | Shed:
        wanted = request.adapter or request.model
        able = [
            replica.id
            for replica in (self._fleet.serving(wanted) if wanted else self._fleet.replicas.values())
            if self._fleet.available(replica.id) and replica.id not in tried
            if request.pinned is None or request.pinned == replica.id
        ]
        if not able:
            return Shed(request.id, "no_replica", RETRY_AFTER_S)
        first = next(self._turn) % len(able)
        in_flight = self.in_flight
        best = min(able[first:] + able[:first], key=lambda id: in_flight.get(id, 0))
        return Dispatch(request.id, best, "fallback")

    def sent(self, replica_id: str) -> None:
        self.in_flight[replica_id] = self.in_flight.get(replica_id, 0) + 1

    def over(self, replica_id: str) -> None:
        left = self.in_flight[replica_id] - 1
        if left:
            self.in_flight[replica_id] = left
        else:
            del self.in_flight[replica_id]
