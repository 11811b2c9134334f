"""The Balancer: events in, decisions out. Everything else in the gateway only delivers events to it.

Each request is charged to a ledger when it is dispatched, before any I/O, and leaves by exactly one of completed,
shed or cancelled; events that come late, twice or for unknown requests change nothing. Bare policies dispatch at once;
with admission or pacing requests are bound late (`binding.py`). Order is deterministic: the same seed and the
same events give the same decisions. One per gateway process; not thread-safe; it never blocks.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Mapping, Set
from typing import Any, Final

from policies.binding import LateBinding
from policies.classes import by_name
from policies.dispatching import Dispatcher
from policies.model import (
    Abort,
    Added,
    Alternative,
    Choice,
    Decision,
    Dispatch,
    FleetEvent,
    Outcome,
    Pulse,
    Request,
    ServiceClass,
    Shed,
    Usage,
)
from policies.policy import RoutingPolicy
from policies.roster import Roster
from policies.settings import Settings, chosen
from policies.tracked import Tracked

LEAST_PART: Final = 0.05  # of the fleet that a gateway counts on, however little it is asked for
LONG_S: Final = 0.1  # of prefill, from which other gateways are told at once
BACKPRESSURE_S: Final = 0.25  # a replica that refused for load gets nothing for this long


class Balancer:
    """`now` is monotonic seconds and never goes back; `rng` is the only source of chance."""

    def __init__(
        self,
        classes: Iterable[ServiceClass] | Mapping[str, ServiceClass],
        policy: RoutingPolicy,
        settings: Settings | Mapping[str, Any] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """settings: also a mapping of the names in `Settings`, None for its defaults. rng None: seeded with 0.

        Raises ValueError for an unknown setting, a value of the wrong type, or two classes of one name."""
        self.classes = by_name(classes)
        self.policy = policy
        self.settings = settings = chosen(settings)
        self.dispatcher = Dispatcher(policy, settings)
        self.fleet = self.dispatcher.fleet
        self.binding = LateBinding(self.dispatcher, settings, rng or random.Random(0))
        self.roster = Roster(self.dispatcher, self.binding)
        self._open: dict[str, Tracked] = {}
        self._deadlines: list[tuple[float, str, Tracked]] = []  # of dispatched requests
        self._now = 0.0

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> list[Decision]:
        """A new request: exactly one of the answers is about it. Raises ValueError when its id is already open."""
        self._now = now
        if request.id in self._open:
            raise ValueError(f"request id {request.id!r} is already open; ids must be unique among open requests")
        service_class = self.classes.get(request.service_class)
        if service_class is None:
            service_class = self.classes[request.service_class] = ServiceClass(request.service_class)
        tracked = self._open[request.id] = Tracked(request, service_class)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.id, tracked))
        return self._place(tracked, now)

    def first_token(self, request_id: str, now: float) -> list[Decision]:
        """The first content event of a dispatched request: its replica has prefilled everything up to it."""
        self._now = now
        tracked = self._open.get(request_id)
        if tracked is None:
            return []
        self.dispatcher.first_token(tracked, now)
        return self._moved(now)

    def failed(self, request_id: str, outcome: Outcome, now: float) -> list[Decision]:
        """This attempt is over, the request is not: it goes elsewhere, waits, or is shed."""
        self._now = now
        tracked = self._open.get(request_id)
        if tracked is None or tracked.replica is None:
            return []
        replica = tracked.replica
        if outcome is Outcome.BACKPRESSURE:
            replica.closed_until = now + BACKPRESSURE_S
            if self.settings.holds:
                tracked.forget_try(replica.id)  # full, not broken: it may have room later
        self.binding.over(tracked, outcome, None, now)
        self.dispatcher.release(tracked, outcome, None, now)
        return self._place(tracked, now)

    def complete(self, request_id: str, outcome: Outcome, usage: Usage | None, now: float) -> list[Decision]:
        """The request is over, whatever came of it."""
        self._now = now
        tracked = self._open.pop(request_id, None)
        if tracked is None:
            return []
        if tracked.held:
            self.binding.leave(tracked)
        elif tracked.replica is not None:
            self.binding.over(tracked, outcome, usage, now)
        self.dispatcher.release(tracked, outcome, usage, now)
        return self._moved(now)

    def cancel(self, request_id: str, now: float) -> list[Decision]:
        """The client left; the caller stops the attempt, if there is one."""
        return self.complete(request_id, Outcome.CANCELLED, None, now)

    def adopt(self, request: Request, replica_id: str, since: float, started: bool, now: float) -> list[Decision]:
        """A request that runs on a replica already, dispatched at `since` by a core before this one: charged as if it
        had been sent there now. Nothing is decided. Raises ValueError when its id is already open.

        Where the replica is not known (any more) the request is not known here either.
        """
        self._now = now
        if request.id in self._open:
            raise ValueError(f"request id {request.id!r} is already open; ids must be unique among open requests")
        pool = self.fleet.pool(request)
        if replica_id not in pool.by_id:
            return []
        service_class = self.classes.get(request.service_class)
        if service_class is None:
            service_class = self.classes[request.service_class] = ServiceClass(request.service_class)
        tracked = self._open[request.id] = Tracked(request, service_class)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.id, tracked))
        self.dispatcher.sight.look(pool, tracked, now)
        self.dispatcher.dispatch(tracked, pool, Choice(replica_id, "adopted"), now)
        charge, replica = tracked.charge, tracked.replica
        assert charge is not None
        assert replica is not None
        charge.dispatched_at = since
        if started:  # it is no sample of anything: its prefill was before our time
            tracked.started = True
            replica.fill.pop(request.id, None)
            replica.ledger.begun(request.id, charge)
            replica.changed(now)
        return []

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    # -- fleet and time ----------------------------------------------------------------------------------------

    def pulse(self, replica_id: str, pulse: Pulse, now: float) -> list[Decision]:
        self._now = now
        replica = self.fleet.replicas.get(replica_id)
        if replica is None:
            return []
        decode = replica.decode
        decode.add(pulse.idle_gaps, pulse.idle_gap_sum_s, busy=False)
        decode.add(pulse.busy_gaps, pulse.busy_gap_sum_s, busy=True)
        replica.pulsed = pulse
        replica.pace.pulse(replica.everyones(pulse, now), decode, self.settings, now)
        replica.view.predicted_tpot_s = decode.mean(replica.pace.rate) or self.settings.prior_decode_step_s
        back = self.binding.make_way(replica, now)
        return back + self._moved(now)

    def fleet_event(self, event: FleetEvent, now: float) -> list[Decision]:
        """Events about replicas that are not (or no longer) there are ignored, except that Added adds them."""
        self._now = now
        if not self.roster.apply(event, now):
            return []
        self.policy.observe(event, now)
        return self._moved(now)

    def configure(self, settings: Settings, now: float) -> list[Decision]:
        """New settings; ledgers, fits, the queue and open requests stay."""
        self._now = now
        self.settings = settings
        self.dispatcher.configure(settings)
        self.binding.configure(settings)
        self._see_all(now)
        self.fleet.panic_share = settings.panic_share
        self.fleet.refresh()
        return self._moved(now)

    def reclass(self, classes: Iterable[ServiceClass] | Mapping[str, ServiceClass], now: float) -> list[Decision]:
        """New service classes. Open requests keep the objectives they came with; shares change for all."""
        self._now = now
        self.classes = by_name(classes)
        self.binding.queue.reclass(self.classes)
        return self._moved(now)

    def use(self, policy: RoutingPolicy, now: float) -> None:
        """Another routing policy from the next decision on. It is told of the replicas; ledgers and index stay."""
        self._now = now
        self.policy = policy
        self.dispatcher.use(policy)
        self._see_all(now)
        for r in self.fleet.replicas.values():
            policy.observe(Added(r.id, r.models, r.adapters_served, r.view.weight, r.view.role), now)

    def wake(self, now: float) -> list[Decision]:
        """Time passed; call it at `next_wake()` or later."""
        self._now = now
        decisions: list[Decision] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id, tracked = heapq.heappop(self._deadlines)
            if self._open.get(request_id) is tracked and tracked.replica is not None:
                decisions.append(Abort(request_id, "expired"))
        return decisions + self._moved(now)

    def next_wake(self) -> float | None:
        """Monotonic time at which `wake` should be called if nothing happens before; None: only events matter."""
        while self._deadlines and self._open.get(self._deadlines[0][1]) is not self._deadlines[0][2]:
            heapq.heappop(self._deadlines)
        wake = self.binding.next_wake(self._now)
        if self._deadlines:
            wake = self._deadlines[0][0] if wake is None else min(wake, self._deadlines[0][0])
        return wake

    # -- for other gateways of the same fleet --------------------------------------------------------------------

    def loads(self, now: float) -> dict[str, tuple[int, float, float, int, int, float | None, float, float]]:
        """What a `PeerLoad` says, but for the time, of each replica that has anything of ours; the prefill seconds sent
        there are those since the start."""
        out = {}
        for r in self.fleet.replicas.values():
            ledger, pulse = r.ledger, r.pulsed
            if ledger.in_flight or r.parked_s:
                streams = (pulse.live, pulse.near, pulse.least_slack_s)
                sent = (ledger.in_flight, round(ledger.backlog(now), 1), round(ledger.kv_tokens, 1))
                out[r.id] = (*sent, *streams, round(r.pace.spent_s, 4), round(r.parked_s, 4))
        return out

    def long(self, sent: Dispatch) -> bool:
        """Whether other gateways should hear of it at once: its prefill would be in the way of what they send."""
        replica, predicted = self.fleet.replicas.get(sent.replica_id), sent.prediction
        if replica is None or predicted is None:
            return False
        return predicted.uncached_tokens >= LONG_S * replica.prefill.rate

    def demand(self, now: float) -> float:
        """Prefill seconds per second that was asked for lately."""
        return self.binding.prices.demand(now)

    def shared_with(self, demand_elsewhere: float, now: float) -> None:
        """What other gateways are asked for, as `demand`: this one counts on its part of the fleet only."""
        own = self.demand(now)
        self.binding.part = max(LEAST_PART, own / (own + demand_elsewhere)) if demand_elsewhere > 0.0 else 1.0

    def overload(self) -> dict[str, Any]:
        """What the others are to hear, so that all ask one price."""
        waiting_s: dict[str, float] = {}
        for r in self.fleet.replicas.values():
            waiting_s[r.group] = waiting_s.get(r.group, 0.0) + r.parked_s
        return self.binding.told.said(waiting_s)

    def overloaded_elsewhere(self, gateway: str, said: Mapping[str, Any], now: float) -> None:
        """The `overload` of another gateway."""
        self.binding.told.heard(gateway, said, now)

    def gateways(self, present: Set[str]) -> None:
        """All others but these are gone."""
        self.binding.told.forget(present)

    def served(self) -> dict[tuple[str, str], float]:
        """GPU seconds served since the start, by model and class."""
        return self.binding.queue.totals()

    def served_elsewhere(self, model: str, service_class: str, seconds: float, now: float) -> None:
        """Other gateways served a class: it counts in the shares between classes like our own."""
        known = self.classes.get(service_class)
        if known is not None:
            self.binding.queue.lane(model, known).served_too(seconds, now)

    # -- for the shell -----------------------------------------------------------------------------------------

    @property
    def reads_prefix(self) -> bool:
        """Whether a request's chain changes anything: not for a rule that looks at nothing and sends at once."""
        return self.settings.holds or not self.dispatcher.blind

    def prefilling(self, replica_id: str) -> bool:
        """Whether a prefill is in progress there: which of the two gap sums of a Pulse a gap belongs to."""
        replica = self.fleet.replicas.get(replica_id)
        return replica is not None and (replica.ledger.prefilling or replica.peers_tokens(self._now) > 0.0)

    def backlog_tokens(self, replica_id: str, now: float) -> float:
        """W of one replica; 0 for an unknown one."""
        replica = self.fleet.replicas.get(replica_id)
        return 0.0 if replica is None else replica.ledger.backlog(now)

    def prompt_tokens(self, model: str, prompt_bytes: int) -> int:
        """Estimate from the learnt bytes per token of a model."""
        return max(1, round(self.dispatcher.affinity.bytes_per_token.tokens(model, prompt_bytes)))

    def considered(self, request: Request, now: float) -> tuple[Alternative, ...]:
        """The best replicas for a request that was refused just now, by predicted TTFT; changes nothing."""
        pool, service_class = self.fleet.pool(request), self.classes.get(request.service_class)
        if service_class is None or not pool.replicas:
            return ()
        self.dispatcher.sight.look(pool, Tracked(request, service_class), now)
        views = sorted((r.view for r in pool.open), key=lambda view: view.predicted_ttft_s)
        return tuple(
            Alternative(v.id, v.predicted_ttft_s, round(v.cached_tokens), v.predicted_ttft_s, v.scraped_age_s)
            for v in views[: self.settings.alternatives]
        )

    def snapshot(self) -> dict[str, Any]:
        """What the core believes now, for metrics and the admin pages. Plain values only."""
        return {
            "held": self.binding.queue.held_by_class(),
            "held_bytes": self.binding.queue.bytes,
            "open": len(self._open),
            "shed": dict(self.binding.shed_by_reason),
            "margins": self.dispatcher.margins.values(),
            "prediction_error": self.dispatcher.errors.relative,
            "prediction_bias": self.dispatcher.errors.bias,
            "price_s": self.binding.prices.thresholds(),
            "working_set_tokens": self.binding.working_set.tokens,
            "working_set_share": self.binding.working_set.share,
            "working_set_enforced": self.binding.working_set.enforced,
            "capacity_factor": self.binding.prices.lowest_factor(),
            "replicas": {
                r.id: r.snapshot(self._now) | {"prefix_precision": self.dispatcher.affinity.precision(r.id)}
                for r in self.fleet.replicas.values()
            },
        }

    # -- inside ------------------------------------------------------------------------------------------------

    def _place(self, tracked: Tracked, now: float) -> list[Decision]:
        if self.dispatcher.sight.holds:
            decisions = self.binding.arrive(tracked, now)
            return decisions if len(decisions) == 1 and tracked.replica is not None else self._settle(decisions)
        pool = self.fleet.pool(tracked.request)
        if tracked.attempts < self.settings.max_attempts and pool.replicas:
            if self.dispatcher.by_count:
                sent = self.dispatcher.send_by_count(tracked, pool, now)
                return [sent] if sent is not None else self._settle([self.binding.refuse(tracked, "no_replica", now)])
            choice = self.dispatcher.choose(tracked, pool, now)
            if choice.replica_id is not None:
                return [self.dispatcher.dispatch(tracked, pool, choice, now)]
        return self._settle([self.binding.refuse(tracked, "no_replica", now)])

    def _see_all(self, now: float) -> None:
        """Views in full, of which a blind policy may have read only the counts until now."""
        for replica in self.fleet.replicas.values():
            replica.changed(now)

    def _moved(self, now: float) -> list[Decision]:
        """Something changed that may let held requests go."""
        return self._settle(self.binding.drain(now)) if self.binding.queue.count else []

    def _settle(self, decisions: list[Decision]) -> list[Decision]:
        for decision in decisions:
            if isinstance(decision, Shed):
                del self._open[decision.request_id]
        return decisions
