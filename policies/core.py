"""The Balancer: events in, decisions out. Everything else in the gateway only delivers events to it.

Each request is charged to a ledger when it is dispatched, before any I/O, and leaves by exactly one of
completed, shed or cancelled; events that come late, twice or for unknown requests change nothing.
Order is deterministic: the same seed and the same events give the same decisions.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from policies.classes import by_name
from policies.fleet_state import Fleet, Pool, Replica
from policies.ledger import Charge
from policies.model import (
    Abort,
    Added,
    Alternative,
    Completed,
    Decision,
    Dispatch,
    Dispatched,
    Draining,
    Ejected,
    FirstToken,
    FleetEvent,
    Hold,
    Outcome,
    PeerLoad,
    Prediction,
    Pulse,
    Removed,
    Request,
    Restarted,
    Returned,
    Scraped,
    ServiceClass,
    Shed,
    Usage,
)
from policies.policy import RoutingPolicy
from policies.predictor import Margin, OutputPrior
from policies.settings import Settings

__all__ = ["Abort", "Balancer", "Hold"]


@dataclass(slots=True)
class Tracked:
    """One open request: held (`replica` is None) or dispatched."""

    request: Request
    service_class: ServiceClass
    replica: Replica | None = None
    charge: Charge | None = None
    predicted_ttft_s: float = 0.0
    started: bool = False  # its first token was seen
    attempts: int = 0
    tried: set[str] = field(default_factory=set)


class Balancer:
    """One per gateway process. Not thread-safe; never blocks; `now` is monotonic seconds and never goes back."""

    def __init__(
        self,
        classes: Iterable[ServiceClass] | Mapping[str, ServiceClass],
        policy: RoutingPolicy,
        settings: Settings,
        rng: random.Random,
    ) -> None:
        self.classes = by_name(classes)
        self.policy = policy
        self.settings = settings
        self.rng = rng
        self.fleet = Fleet(settings)
        self.outputs = OutputPrior()
        self.margins: dict[str, Margin] = {}
        self._open: dict[str, Tracked] = {}

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> list[Decision]:
        """A new request. Raises ValueError when its id is already open."""
        if request.id in self._open:
            raise ValueError(f"request id {request.id!r} is already open; ids must be unique among open requests")
        service_class = self.classes.get(request.service_class) or ServiceClass(request.service_class)
        tracked = self._open[request.id] = Tracked(request, service_class)
        return [self._place(tracked, now)]

    def first_token(self, request_id: str, now: float) -> list[Decision]:
        tracked = self._open.get(request_id)
        if tracked is None or tracked.replica is None or tracked.charge is None or tracked.started:
            return []
        tracked.started = True
        replica, charge = tracked.replica, tracked.charge
        since = replica.ledger.busy_since(charge)
        done = replica.ledger.first_token(request_id, charge, now)
        if done and all(c.clocked for c in done) and now > since:
            tokens = sum(c.uncached_tokens for c in done)
            replica.prefill.add(tokens, now - since, self.fleet.prior)
            self.fleet.prior.add(tokens, now - since, None)
        ttft = now - charge.dispatched_at
        if charge.clocked:
            self._margin(tracked.service_class.name).observe(ttft, max(tracked.predicted_ttft_s, 1e-3))
        self.policy.observe(FirstToken(tracked.request, replica.id, ttft, tracked.predicted_ttft_s), now)
        return []

    def failed(self, request_id: str, outcome: Outcome, now: float) -> list[Decision]:
        """This attempt is over, the request is not: answers another Dispatch, or Shed."""
        tracked = self._open.get(request_id)
        if tracked is None or tracked.replica is None:
            return []
        self._release(tracked, outcome, None, now)
        return [self._place(tracked, now)]

    def complete(self, request_id: str, outcome: Outcome, usage: Usage | None, now: float) -> list[Decision]:
        """The request is over, whatever came of it."""
        tracked = self._open.pop(request_id, None)
        if tracked is None:
            return []
        self._release(tracked, outcome, usage, now)
        return []

    def cancel(self, request_id: str, now: float) -> list[Decision]:
        """The client left."""
        return self.complete(request_id, Outcome.CANCELLED, None, now)

    # -- fleet and time ----------------------------------------------------------------------------------------

    def pulse(self, replica_id: str, pulse: Pulse, now: float) -> list[Decision]:
        replica = self.fleet.replicas.get(replica_id)
        if replica is not None:
            replica.decode.add(pulse.idle_gaps, pulse.idle_gap_sum_s, busy=False)
            replica.decode.add(pulse.busy_gaps, pulse.busy_gap_sum_s, busy=True)
        return []

    def fleet_event(self, event: FleetEvent, now: float) -> list[Decision]:
        """Events about replicas that are not (or no longer) there are ignored."""
        if isinstance(event, Added):
            self.fleet.add(event)  # of a known replica: new models or weight; what runs there stays
        replica = self.fleet.replicas.get(event.replica_id)
        if replica is None:
            return []
        match event:
            case Removed():
                self._lost(event.replica_id)
                self.fleet.remove(event.replica_id)
            case Draining():
                replica.draining = event.draining
            case Ejected():
                replica.ejected, replica.statistical = True, event.statistical
            case Returned():
                replica.ejected = replica.statistical = False
            case Restarted():
                self._lost(event.replica_id)
            case Scraped():
                self._scraped(replica, event)
            case PeerLoad():
                replica.peers = event
            case Added():
                pass
        self.fleet.refresh()
        self.policy.observe(event, now)
        return []

    def configure(self, settings: Settings, now: float) -> list[Decision]:
        """New settings; ledgers, fits and open requests stay."""
        self.settings = self.fleet.settings = settings
        self.fleet.refresh()
        return []

    def wake(self, now: float) -> list[Decision]:
        """Time passed; call it at `next_wake()` or later."""
        return []

    def next_wake(self) -> float | None:
        return None

    def prefilling(self, replica_id: str) -> bool:
        """Whether a prefill is in progress there: which of the two gap sums of a Pulse a gap belongs to."""
        replica = self.fleet.replicas.get(replica_id)
        return replica is not None and replica.ledger.prefilling

    def backlog_tokens(self, replica_id: str, now: float) -> float:
        """W of one replica; 0 for an unknown one."""
        replica = self.fleet.replicas.get(replica_id)
        return 0.0 if replica is None else replica.ledger.backlog(now, replica.prefill.rate)

    # -- inside ------------------------------------------------------------------------------------------------

    def _place(self, tracked: Tracked, now: float) -> Dispatch | Shed:
        request = tracked.request
        pool = self.fleet.pool(request)
        if tracked.attempts < self.settings.max_attempts and pool.replicas:
            self._look(pool, tracked, now)
            choice = self.policy.choose(request, pool.view, now)
            if choice.replica_id is not None:
                replica = self.fleet.replicas[choice.replica_id]
                return self._dispatch(tracked, pool, replica, choice.reason, dict(choice.scores), now)
        del self._open[request.id]
        return Shed(request.id, "no_replica", 1.0)

    def _look(self, pool: Pool, tracked: Tracked, now: float) -> None:
        """Refreshes the pool's views for this request."""
        prompt = float(tracked.request.prompt_tokens)
        for replica, up in zip(pool.replicas, pool.open, strict=True):
            view, ledger, fit = replica.view, replica.ledger, replica.prefill
            view.available = up and replica.id not in tracked.tried
            view.in_flight, view.live_decodes, view.kv_tokens = ledger.in_flight, ledger.live_decodes, ledger.kv_tokens
            view.prefill_backlog_tokens = ledger.backlog(now, fit.rate)
            view.cached_tokens, view.uncached_tokens = 0.0, prompt
            view.prefill_rate = fit.rate
            view.predicted_ttft_s = fit.overhead_s + (view.prefill_backlog_tokens + view.uncached_tokens) / fit.rate
            view.predicted_tpot_s = replica.decode.idle_s or self.settings.prior_decode_step_s
            view.scraped_age_s = None if replica.scraped is None else now - replica.scraped.at
            if view.kv_capacity_tokens is not None:
                view.kv_free_tokens = max(0.0, view.kv_capacity_tokens - ledger.kv_tokens)

    def _dispatch(
        self, tracked: Tracked, pool: Pool, replica: Replica, reason: str, scores: dict[str, float], now: float
    ) -> Dispatch:
        request, view = tracked.request, replica.view
        output = self.outputs.expected(request.service_class, request.max_tokens, request.expected_tokens)
        charge = Charge(
            uncached_tokens=view.uncached_tokens,
            kv_tokens=request.prompt_tokens + output,
            dispatched_at=now,
            clocked=request.streams and request.generates,
            release_at=now + view.predicted_ttft_s,
        )
        prediction = Prediction(
            view.predicted_ttft_s,
            view.predicted_tpot_s,
            round(view.uncached_tokens),
            round(view.cached_tokens),
            view.scraped_age_s,
        )
        others = sorted((v for v in pool.view if v is not view and v.available), key=lambda v: scores.get(v.id, 0.0))
        alternatives = tuple(
            Alternative(v.id, scores.get(v.id, 0.0), round(v.cached_tokens), v.predicted_ttft_s, v.scraped_age_s)
            for v in others[: self.settings.alternatives]
        )
        replica.ledger.charge(request.id, charge)
        tracked.replica, tracked.charge, tracked.started = replica, charge, False
        tracked.predicted_ttft_s = view.predicted_ttft_s
        tracked.attempts += 1
        tracked.tried.add(replica.id)
        self.policy.observe(Dispatched(request, replica.id), now)
        return Dispatch(request.id, replica.id, reason, prediction, alternatives)

    def _release(self, tracked: Tracked, outcome: Outcome, usage: Usage | None, now: float) -> None:
        """The one place where an attempt gives back what it was charged."""
        replica, charge = tracked.replica, tracked.charge
        if replica is None or charge is None:
            return
        tracked.replica = tracked.charge = None
        replica.ledger.release(tracked.request.id, charge, now)
        if outcome is Outcome.SUCCESS and usage is not None and usage.completion_tokens:
            self.outputs.observe(tracked.request.service_class, usage.completion_tokens)
        event = Completed(tracked.request, replica.id, outcome, usage, now - charge.dispatched_at)
        self.policy.observe(event, now)

    def _lost(self, replica_id: str) -> None:
        """All that ran on it is gone; the shell will report each attempt as failed."""
        replica = self.fleet.replicas[replica_id]
        open_there = [t.charge for t in self._open.values() if t.replica is replica and t.charge is not None]
        replica.ledger.restart(open_there)

    def _scraped(self, replica: Replica, event: Scraped) -> None:
        replica.scraped = replica.view.scraped = event
        if event.num_gpu_blocks and event.block_size:
            replica.view.kv_capacity_tokens = float(event.num_gpu_blocks * event.block_size)

    def _margin(self, class_name: str) -> Margin:
        found = self.margins.get(class_name)
        if found is None:
            found = self.margins[class_name] = Margin(self.settings.target_attainment)
        return found
