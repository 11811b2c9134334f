"""The clock and the event loop around the core: calls in, decisions out to whoever waits for them.

The core never waits and never reads a clock. This shell stamps each event with monotonic time, hands each decision to
the owner of its request, keeps one timer at the core's next wake, and one tick of about 50 ms that exists only while
requests are open: it sends pulses and lets the proxy look at its deadlines. Owners answer decisions synchronously
(`on_decision`), so a request that is dispatched at once never leaves its coroutine.
Each request ends by exactly one of: its Shed, `complete`, `cancel`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from mypy_extensions import mypyc_attr

from gateway.placement import Owner
from gateway.pulses import Meter
from policies.core import Balancer
from policies.model import (
    Abort,
    Decision,
    Dispatch,
    FleetEvent,
    Hold,
    Outcome,
    Removed,
    Request,
    Scraped,
    ServiceClass,
    Shed,
    Usage,
)
from policies.policy import RoutingPolicy
from policies.settings import Settings

TICK_S = 0.05
log = logging.getLogger("forebay.scheduler")


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler:
    """One per process, on one event loop. `on_tick` is called about every 50 ms while requests are open."""

    charges = False  # tenants are charged before they come here

    def __init__(self, balancer: Balancer, clock: Callable[[], float] = time.monotonic) -> None:
        self.balancer = balancer
        self.clock = clock
        self.on_tick: Callable[[float], bool] | None = None  # answers whether more ticks are needed
        self.meters: dict[str, Meter] = {}
        self._owners: dict[str, Owner] = {}
        self._held: set[str] = set()
        self._wake_at: float | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_tick = 0.0

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Binds to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._arm()

    def stop(self) -> None:
        """Stops timers; open requests are whoever owns them's to end."""
        for timer in (self._wake, self._tick):
            if timer is not None:
                timer.cancel()
        self._wake = self._tick = self._wake_at = None
        self._loop = None

    @property
    def reads_prefix(self) -> bool:
        return self.balancer.reads_prefix

    @property
    def held(self) -> int:
        """Requests held for dispatch."""
        return len(self._held)

    @property
    def open(self) -> int:
        return len(self._owners)

    def tick(self) -> None:
        """Something is open: ticks until nothing is."""
        if self._tick is None and self._loop is not None:
            self._tick = self._loop.call_later(TICK_S, self._ticked)

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, request: Request, owner: Owner) -> None:
        self._owners[request.id] = owner
        self.tick()
        self._apply(self.balancer.submit(request, self.clock()))

    def adopt(self, request: Request, owner: Owner, replica_id: str, since: float, started: bool) -> None:
        """A request that runs already, dispatched at `since` by whoever decided before."""
        self._owners[request.id] = owner
        self.tick()
        self._apply(self.balancer.adopt(request, replica_id, since, started, self.clock()))

    def first_token(self, request_id: str, replica_id: str) -> None:
        decisions = self.balancer.first_token(request_id, self.clock())
        self._look(replica_id)
        self._apply(decisions)

    def failed(self, request_id: str, outcome: Outcome) -> None:
        """The attempt is over; the core answers with another Dispatch, Hold or Shed."""
        self._apply(self.balancer.failed(request_id, outcome, self.clock()))

    def complete(self, request_id: str, outcome: Outcome, usage: Usage | None, replica_id: str | None) -> None:
        """The request is over. For one that was shed this is a no-op in the core."""
        self._owners.pop(request_id, None)
        self._held.discard(request_id)
        now = self.clock()
        if outcome is Outcome.CANCELLED:
            decisions = self.balancer.cancel(request_id, now)
        else:
            decisions = self.balancer.complete(request_id, outcome, usage, now)
        if replica_id is not None:
            self._look(replica_id)
        self._apply(decisions)

    def dispatched(self, replica_id: str) -> Meter:
        """The meter of a replica that work goes to now."""
        meter = self.meters.get(replica_id)
        if meter is None:
            meter = self.meters[replica_id] = Meter(replica_id)
        meter.prefilling = self.balancer.prefilling(replica_id)
        return meter

    # -- fleet and settings --------------------------------------------------------------------------------------

    def fleet_event(self, event: FleetEvent) -> None:
        if isinstance(event, Scraped):
            meter = self.meters.get(event.replica_id)
            if meter is not None:
                meter.scraped(event)
        elif isinstance(event, Removed):
            self.meters.pop(event.replica_id, None)
        self._apply(self.balancer.fleet_event(event, self.clock()))

    def configure(self, settings: Settings) -> None:
        self._apply(self.balancer.configure(settings, self.clock()))

    def reclass(self, classes: Mapping[str, ServiceClass]) -> None:
        """New service classes; open requests keep the objectives they came with."""
        self._apply(self.balancer.reclass(classes, self.clock()))

    def use(self, policy: RoutingPolicy) -> None:
        """Another routing policy from the next decision on. It is told of the replicas and learns the rest."""
        self.balancer.use(policy, self.clock())

    # -- inside --------------------------------------------------------------------------------------------------

    def _look(self, replica_id: str) -> None:
        meter = self.meters.get(replica_id)
        if meter is not None:
            meter.prefilling = self.balancer.prefilling(replica_id)

    def _apply(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            request_id = decision.request_id
            owner = self._owners.get(request_id)
            if type(decision) is Dispatch and owner is not None:  # the usual one
                if self._held:
                    self._held.discard(request_id)
                owner.on_decision(decision)
                continue
            if isinstance(decision, Hold) or (isinstance(decision, Abort) and decision.requeue):
                self._held.add(request_id)
            else:
                self._held.discard(request_id)
            if isinstance(decision, Shed):
                self._owners.pop(request_id, None)
            if owner is not None:
                owner.on_decision(decision)
            else:
                log.warning("decision %s for a request that nobody owns", type(decision).__name__)
        self._arm()

    def _arm(self) -> None:
        due = self.balancer.next_wake()
        if due == self._wake_at or self._loop is None:
            return
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        self._wake_at = due
        if due is not None:
            self._wake = self._loop.call_later(max(0.0, due - self.clock()), self._woken)

    def _woken(self) -> None:
        self._wake = self._wake_at = None
        self._apply(self.balancer.wake(self.clock()))

    def _ticked(self) -> None:
        """Whatever goes wrong in one tick, the next one comes: deadlines live by it."""
        self._tick = None
        try:
            busy = self._look_around(self.clock())
        except BaseException:
            self.tick()
            raise
        if busy or self._owners:
            self.tick()

    def _look_around(self, now: float) -> bool:
        """Pulses of the replicas, and the owners' look at their deadlines; whether more ticks are needed."""
        for meter in list(self.meters.values()):
            if meter.stirred:
                decisions = self.balancer.pulse(meter.replica_id, meter.pulse(now), now)
                meter.prefilling = self.balancer.prefilling(meter.replica_id)
                if decisions:
                    self._apply(decisions)
        self._arm()
        return self.on_tick(now) if self.on_tick is not None else False
