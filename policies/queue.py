"""Where requests wait: shares between classes, fairness between tenants, earliest deadline first inside.

Each model and class is a lane, each tenant in it a flow. Both levels are served by least service over weight in
predicted GPU seconds, and whoever becomes active is lifted to the least of the active ones, so that idling
saves nothing up (virtual token counter, Sheng et al., OSDI 2024: the long-run shares of deficit round robin, without a
quantum). A lane below its floor share goes first; lanes that only fill go last. Inside a flow EDF is optimal while all
can be met; what cannot is refused (`admission.py`, `price.py`).
Trade-off: a flow is a sorted list, so insertion moves memory: 1 us at 2,000 held.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import Final

from policies.model import ServiceClass
from policies.tracked import Tracked

SERVED_MEMORY_S: Final = 30.0  # over which floor shares are measured
LEAST_WEIGHT: Final = 1e-3
Key = tuple[float, int, Tracked]


class Flow:
    """Requests of one tenant in one lane, ordered by due time."""

    __slots__ = ("entries", "lane", "service_s", "tenant")

    def __init__(self, lane: Lane, tenant: str | None) -> None:
        self.lane, self.tenant = lane, tenant
        self.service_s = 0.0  # virtual: GPU seconds served over its weight, lifted when it becomes active
        self.entries: list[Key] = []


class Lane:
    """One class of one model."""

    __slots__ = ("flows", "idle", "model", "served_at", "served_s", "service_class", "service_s", "total_s")

    def __init__(self, model: str, service_class: ServiceClass) -> None:
        self.model, self.service_class = model, service_class
        self.service_s = 0.0  # virtual, divided by weight
        self.served_s = 0.0  # decayed
        self.served_at = 0.0
        self.total_s = 0.0  # served here since the start
        self.flows: dict[str | None, Flow] = {}  # active ones
        self.idle: dict[str | None, float] = {}  # virtual service of tenants seen lately

    def served(self, now: float) -> float:
        since = now - self.served_at
        if since > 0.0:
            self.served_s *= 0.5 ** (since / SERVED_MEMORY_S)
            self.served_at = now
        return self.served_s

    def served_too(self, seconds: float, now: float) -> None:
        """GPU seconds it was served, here or by another gateway."""
        weight = self.service_class.weight
        self.service_s += seconds / (weight if weight > LEAST_WEIGHT else LEAST_WEIGHT)
        self.served_s = self.served(now) + seconds

    def starves(self, total_s: float, now: float) -> bool:
        """Below its floor of what all lanes of the model were served, and waiting for that long already."""
        floor = self.service_class.floor_share
        if floor <= 0.0 or self.served(now) >= floor * total_s:
            return False
        return any(f.entries[0][2].request.received_at <= now - SERVED_MEMORY_S for f in self.flows.values())


class HeldQueue:
    """All held requests. Adding and removing are O(log n) comparisons."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._seq = 0
        self.count = 0
        self.bytes = 0

    def __len__(self) -> int:
        return self.count

    def add(self, tracked: Tracked, due: float) -> None:
        request = tracked.request
        lane = self.lane(request.model, tracked.service_class)
        flow = lane.flows.get(request.tenant)
        if flow is None:
            if not lane.flows:
                lane.service_s = max(lane.service_s, min((x.service_s for x in self._active(lane.model)), default=0.0))
            flow = Flow(lane, request.tenant)
            level = min((f.service_s for f in lane.flows.values()), default=0.0)
            flow.service_s = max(level, lane.idle.pop(request.tenant, 0.0))
            lane.flows[request.tenant] = flow
        self._seq += 1
        tracked.flow, tracked.due, tracked.seq = flow, due, self._seq
        insort(flow.entries, (due, self._seq, tracked))
        self.count += 1
        self.bytes += request.prompt_bytes

    def remove(self, tracked: Tracked) -> None:
        flow = tracked.flow
        if flow is None:
            return
        del flow.entries[bisect_left(flow.entries, (tracked.due, tracked.seq))]
        tracked.flow = None
        self.count -= 1
        self.bytes -= tracked.request.prompt_bytes
        if not flow.entries:
            lane = flow.lane
            del lane.flows[flow.tenant]
            if len(lane.idle) > 4096:  # tenants are bounded by configuration, names in headers are not
                lane.idle.clear()
            lane.idle[flow.tenant] = flow.service_s

    def charge(self, tracked: Tracked, seconds: float, now: float) -> None:
        """GPU seconds served to this request's tenant and class; also for requests that never waited."""
        request = tracked.request
        lane = self.lane(request.model, tracked.service_class)
        lane.served_too(seconds, now)
        lane.total_s += seconds
        if not lane.flows:  # nobody waits, so nobody's turn moves
            return
        seconds /= max(request.tenant_weight, 1e-3)
        flow = lane.flows.get(request.tenant)
        if flow is not None:
            flow.service_s += seconds
        else:  # it has nothing waiting; remember what it took while others wait
            level = min(f.service_s for f in lane.flows.values())
            lane.idle[request.tenant] = max(level, lane.idle.get(request.tenant, 0.0)) + seconds

    def totals(self) -> dict[tuple[str, str], float]:
        """GPU seconds served here since the start, by model and class."""
        return {key: lane.total_s for key, lane in self._lanes.items() if lane.total_s}

    def reclass(self, classes: Mapping[str, ServiceClass]) -> None:
        """New weights, floors and kinds for the lanes that are there; a class that is gone keeps its lane as it was."""
        for lane in self._lanes.values():
            lane.service_class = classes.get(lane.service_class.name, lane.service_class)

    def lane(self, model: str, service_class: ServiceClass) -> Lane:
        key = (model, service_class.name)
        found = self._lanes.get(key)
        if found is None:
            found = self._lanes[key] = Lane(model, service_class)
        return found

    def lanes(self, now: float) -> list[Lane]:
        """Lanes with something held, in the order in which they should be served."""
        active = [lane for lane in self._lanes.values() if lane.flows]
        if len(active) < 2:
            return active
        total: dict[str, float] = {}
        for lane in self._lanes.values():
            total[lane.model] = total.get(lane.model, 0.0) + lane.served(now)

        def turn(lane: Lane) -> tuple[int, float]:
            if lane.starves(total[lane.model], now):
                return (0, lane.service_s)
            return (2 if lane.service_class.fill_only else 1, lane.service_s)

        return sorted(active, key=turn)

    def starves(self, lane: Lane, now: float) -> bool:
        """Whether a lane waits for its floor share."""
        return lane.starves(sum([x.served(now) for x in self._lanes.values() if x.model == lane.model], 0.0), now)

    def in_order(self, now: float, depth: int = 64) -> Iterator[Tracked]:
        """Held requests in service order, at most `depth` of each flow. Do not change the queue while iterating."""
        for lane in self.lanes(now):
            flows = list(lane.flows.values())
            if len(flows) > 1:
                flows.sort(key=lambda f: f.service_s)
            for flow in flows:
                for _, _, tracked in flow.entries[:depth]:
                    yield tracked

    def everything(self) -> Iterator[Tracked]:
        for lane in self._lanes.values():
            for flow in lane.flows.values():
                for _, _, tracked in flow.entries:
                    yield tracked

    def held_by_class(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for lane in self._lanes.values():
            name = lane.service_class.name
            held[name] = held.get(name, 0) + sum([len(f.entries) for f in lane.flows.values()], 0)
        return held

    def _active(self, model: str) -> list[Lane]:
        return [x for x in self._lanes.values() if x.model == model and x.flows]
