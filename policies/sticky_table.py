"""sticky_table: sessions stay where they are unless their home is overloaded *and* they are cheap to rebuild.

New session: argmin (in flight, resident sessions). Known: its home, unless home - min in flight >= 8 and home >= 2
max(1, min) and the body is at most 32 KiB: then it moves. Idle sessions leave after 1800 s; at most 262,144 are
kept, later ones are routed without being recorded; requests without a session go to the least loaded. (vllm-router,
branch sticky_table.) Its reason for the size limit: in a trace replay unconditional moving doubled the total
prefill work and amplified the overload. Trade-off: sessions that share a prefix do not find each other.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from random import Random

from policies.model import Choice, Dispatched, FleetView, PolicyEvent, Removed, Request
from policies.parameters import parameter
from policies.policy import NONE_AVAILABLE


@dataclass(frozen=True)
class StickyTableParameters:
    imbalance: int = parameter(8, 0, None, "requests a home must have above the least loaded")
    ratio: float = parameter(2.0, 1.0, None, "and how many times the least loaded")
    movable_bytes: int = parameter(32 * 1024, 0, None, "largest prompt that may move, bytes")
    ttl_s: float = parameter(1800.0, 0.0, None, "idle time after which a session is forgotten, seconds")
    capacity: int = parameter(262_144, 1, None, "sessions kept")


class StickyTable:
    name = "sticky_table"

    def __init__(self, parameters: StickyTableParameters, rng: Random) -> None:
        self._p = parameters
        self._homes: OrderedDict[str, tuple[str, float]] = OrderedDict()  # session -> (replica, last used)
        self._resident: dict[str, int] = {}

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        self._forget_idle(now)
        lightest = min(available, key=lambda r: (r.in_flight, self._resident.get(r.id, 0)))
        known = self._homes.get(request.session) if request.session is not None else None
        home = next((r for r in available if known is not None and r.id == known[0]), None)
        if home is None:
            return Choice(lightest.id, "load" if request.session is None else "cold")
        fewest = min(r.in_flight for r in available)
        overloaded = home.in_flight - fewest >= self._p.imbalance and home.in_flight >= self._p.ratio * max(1, fewest)
        if overloaded and request.prompt_bytes <= self._p.movable_bytes:
            return Choice(lightest.id, "spill")
        return Choice(home.id, "affinity")

    def observe(self, event: PolicyEvent, now: float) -> None:
        if isinstance(event, Dispatched) and event.request.session is not None:
            session = event.request.session
            if session in self._homes:
                self._drop(session)
            elif len(self._homes) >= self._p.capacity:
                return
            self._homes[session] = (event.replica_id, now)
            self._resident[event.replica_id] = self._resident.get(event.replica_id, 0) + 1
        elif isinstance(event, Removed):
            for session in [s for s, (replica_id, _) in self._homes.items() if replica_id == event.replica_id]:
                self._drop(session)

    def _drop(self, session: str) -> None:
        replica_id, _ = self._homes.pop(session)
        self._resident[replica_id] -= 1

    def _forget_idle(self, now: float) -> None:
        while self._homes:
            session, (_, used) = next(iter(self._homes.items()))
            if now - used <= self._p.ttl_s:
                return
            self._drop(session)
