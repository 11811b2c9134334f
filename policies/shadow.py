"""What other policies would have done with the same requests: asked, compared, never followed.

To the core it is the acting policy. For a share of sessions (by hash, so that a stateful shadow sees whole
conversations) each shadow is shown the same views in the same instant; at dispatch its choice is compared with the one
taken: same replica or not, and by how many uncached tokens and predicted seconds to first token it differs. It is
one step off the path taken: caches and queues are those that the acting policy made, and a shadow that acted would
meet others. Trade-off: the share bounds the cost, events included, and makes rare differences slow to show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from policies.model import (
    Choice,
    Completed,
    Dispatched,
    FirstToken,
    FleetView,
    PolicyEvent,
    Request,
    Shadowed,
)
from policies.policy import RoutingPolicy, listens

MOST_OPEN = 4096  # compared and not yet dispatched: those that are shed leave no event


@dataclass(slots=True)
class Tally:
    """Sums over the requests that one shadow was asked about; differences are shadow minus acting."""

    asked: int = 0
    agreed: int = 0
    fewer_tokens: float = 0.0  # uncached, where the shadow would have had fewer
    more_tokens: float = 0.0
    sooner_s: float = 0.0  # predicted time to first token
    later_s: float = 0.0

    def add(self, seen: Shadowed) -> None:
        self.asked += 1
        self.agreed += seen.agrees
        if seen.uncached_tokens < 0:
            self.fewer_tokens -= seen.uncached_tokens
        else:
            self.more_tokens += seen.uncached_tokens
        if seen.ttft_s < 0.0:
            self.sooner_s -= seen.ttft_s
        else:
            self.later_s += seen.ttft_s


class Shadowing:
    """`acting` decides; `shadows` are asked about a share (0 to 1) of sessions. `tallies` outlive it."""

    def __init__(
        self,
        acting: RoutingPolicy,
        shadows: Mapping[str, RoutingPolicy],
        share: float,
        tallies: Mapping[str, Tally],
    ) -> None:
        self.acting = acting
        self.name = acting.name
        self.shadows = dict(shadows)
        self.tallies = tallies
        self.blind = all(getattr(policy, "blind", False) for policy in (acting, *shadows.values()))
        self._limit = int(share * (1 << 64))
        self._acting_listens = listens(acting)
        self._ears: Sequence[RoutingPolicy] = [policy for policy in shadows.values() if listens(policy)]
        self._seen: dict[str, tuple[Shadowed, ...]] = {}

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        taken = self.acting.choose(request, fleet, now)
        if taken.replica_id is not None and self._samples(request):
            if len(self._seen) >= MOST_OPEN:
                self._seen.clear()
            mine = fleet.get(taken.replica_id)
            seen = []
            for name, shadow in self.shadows.items():
                other = shadow.choose(request, fleet, now).replica_id
                theirs = None if other is None else fleet.get(other)
                if mine is not None and theirs is not None:
                    tokens = int(theirs.uncached_tokens - mine.uncached_tokens)
                    later = theirs.predicted_ttft_s - mine.predicted_ttft_s
                    seen.append(Shadowed(name, theirs.id, theirs is mine, tokens, round(later, 6)))
            self._seen[request.id] = tuple(seen)
        return taken

    def observe(self, event: PolicyEvent, now: float) -> None:
        if self._acting_listens:
            self.acting.observe(event, now)
        if isinstance(event, Dispatched | FirstToken | Completed):
            request = event.request
            if not self._samples(request):
                return
            if isinstance(event, Dispatched):
                request.shadows = self._seen.pop(request.id, ())
                for seen in request.shadows:
                    self.tallies[seen.policy].add(seen)
        for shadow in self._ears:
            shadow.observe(event, now)

    def _samples(self, request: Request) -> bool:
        return xxh3_64_intdigest((request.session or request.id).encode(errors="surrogateescape")) < self._limit
