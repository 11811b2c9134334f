"""Late binding: requests wait here, where they can be ordered, moved or refused, and not in an engine's queue.

A request is decided on arrival, and again whenever room appears (`room.py`), in the queue's order: feasible replicas
first, then the policy's choice; when the chosen replica has no room it is parked there and waits (a warm replica soon
free may be better than a cold one now; what is parked counts as that replica's backlog for everybody else). At its
latest start it is refused, or sent anyway if its class may not be shed. Under overload what costs most is refused at
arrival (`price.py`); dropping held requests by the same rule (Moore-Hodgson over the queue) was measured and is worse.
"""

from __future__ import annotations

import heapq
import random
from typing import Final

from policies.admission import SizeFairness, StickyRefusals, Why
from policies.dispatching import Dispatcher
from policies.fleet_state import Pool, Replica
from policies.model import Abort, Choice, Decision, Hold, Outcome, Shed, Usage
from policies.predictor import LARGEST_MARGIN
from policies.prices import Prices
from policies.queue import LEAST_WEIGHT, HeldQueue
from policies.room import Room
from policies.settings import Settings
from policies.told import Told
from policies.tracked import NEVER, Tracked
from policies.working_set import WorkingSet

LOOK_AGAIN_S: Final = 0.25  # a parked request is decided again at least this often while somebody has room
LOOKS: Final = 8  # decisions at most for one place: bounds the cost of a wake
TAKEN_BACK: Final = 2  # times at most for one request: its prefill is lost each time


class LateBinding:
    """Owns the queue and everything about refusing; sends through the dispatcher."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings, rng: random.Random) -> None:
        self.dispatcher = dispatcher
        self.fleet, self.sight = dispatcher.fleet, dispatcher.sight
        self.margins, self.outputs = dispatcher.margins, dispatcher.outputs
        self.settings = settings
        self.rng = rng
        self.queue = HeldQueue()
        self.room = Room(self.queue, settings)
        self.fairness = SizeFairness(settings.size_fairness)
        self.prices = Prices(self.fairness)
        self.told = Told(self.prices, self.fairness)
        self.part = 1.0  # of the fleet that is ours to fill, beside other gateways
        self.sticky = StickyRefusals()
        self.working_set = WorkingSet(settings.working_set_share)
        self.shed_by_reason: dict[str, int] = {}
        self._expiry: list[tuple[float, int, Tracked]] = []
        self._expiry_seq = 0

    def configure(self, settings: Settings) -> None:
        self.settings = self.room.settings = settings
        self.fairness.bound = settings.size_fairness

    # -- arrival and retry -------------------------------------------------------------------------------------

    def arrive(self, tracked: Tracked, now: float) -> list[Decision]:
        """Decides a request that is neither held nor out; a refused one is the caller's to forget (`Shed`)."""
        request, settings, queue = tracked.request, self.settings, self.queue
        first = tracked.attempts == 0
        if first:
            self.fairness.arrived(request.prompt_tokens)
        pool = self.fleet.pool(request)
        if tracked.attempts >= settings.max_attempts or not pool.replicas:
            return [self.refuse(tracked, "no_replica", now)]
        service_class = tracked.service_class
        may_refuse = settings.admission and service_class.sheddable
        if first and may_refuse:
            if queue.count and self.sticky.refused(request.session, now):
                return [self.refuse(tracked, "infeasible", now, Why.NOW)]
            if queue.count >= settings.max_held or queue.bytes >= settings.max_held_bytes:
                return [self.refuse(tracked, "queue_full", now)]
        before: list[Decision] = self.drain(now) if queue.count else []
        choice = self._choose(tracked, pool, now)
        self._set_latest_start(tracked, pool)
        tight = may_refuse and now > tracked.latest_start
        if tight and tracked.tried:  # it was let in and a replica failed it: late is better than an error
            return [*before, self._send_least_late(tracked, pool, now)]
        if tight and (queue.count or (choice := self._just_in_time(tracked, pool, now)).replica_id is None):
            best = self.sight.best_start_s
            margin = self.margins.bound(request.service_class, best) - best
            why = Why.HOPELESS if tracked.latest_start + margin < request.received_at else Why.NOW
            return [*before, self.refuse(tracked, "infeasible", now, why, best if why is Why.HOPELESS else None)]
        hurried = request.ttft_deadline is not None or request.deadline is not None  # else it cannot be late
        if first and may_refuse and hurried and not service_class.fill_only:
            price, weight = self.prices.of(pool.group), service_class.weight
            if price.due(now):
                told, whole = self.told, pool.whole
                capacity = self._capacity(whole, now) / (self.part if told.waiting_s else 1.0)
                waiting_s = sum([r.parked_s for r in whole.open], 0.0) + told.waiting(pool.group)
                most_s = tracked.latest_start - request.received_at
                strained = price.strained(waiting_s / capacity if capacity > 0.0 else NEVER, most_s, now)
                price.set(capacity, now, waiting_s, whole.tariff(), strained)
            uncached = self.sight.best_uncached
            tokens = uncached / (weight if weight > LEAST_WEIGHT else LEAST_WEIGHT)
            context = tokens * (request.prompt_tokens - 0.5 * uncached)  # u (h + u/2), h + u being all of it
            self.told.asked(now, pool.group, request.prompt_tokens, tokens, request.tenant, context)
            if price.too_dear(request.prompt_tokens, tokens, request.tenant, now, context):
                return [*before, self.refuse(tracked, "infeasible", now, Why.PRICED)]
        if first and settings.working_set and not self.working_set.alive(request):
            tracked.newcomer = request.prompt_tokens > self._newcomers_room(pool, now)
        if not tracked.newcomer:
            decisions, sent = self._send_if_room(tracked, pool, choice, now)
            if sent:
                return before + decisions if before else decisions
            before += decisions
        if tight:
            return [*before, self.refuse(tracked, "infeasible", now, Why.NOW)]
        if choice.replica_id is None and not any(r.id not in tracked.tried for r in pool.replicas if not r.down):
            return [*before, self.refuse(tracked, "no_replica", now)]
        return [*before, self.hold(tracked, choice, now)]

    def hold(self, tracked: Tracked, choice: Choice, now: float) -> Hold:
        self.queue.add(tracked, self._due(tracked))
        self._park(tracked, choice, now)
        self._look_at(tracked.latest_start, tracked)
        return Hold(tracked.request.id, tracked.latest_start)

    def _look_at(self, at: float, tracked: Tracked) -> None:
        """Wake then for this one, if it is still held."""
        self._expiry_seq += 1
        heapq.heappush(self._expiry, (at, self._expiry_seq, tracked))

    def leave(self, tracked: Tracked) -> None:
        """Out of the queue, whatever for."""
        self._unpark(tracked)
        self.queue.remove(tracked)

    def refuse(self, tracked: Tracked, reason: str, now: float, why: Why = Why.LATE, best: float | None = None) -> Shed:
        self.leave(tracked)
        request = tracked.request
        self.shed_by_reason[reason] = self.shed_by_reason.get(reason, 0) + 1
        late = why is Why.LATE and reason == "infeasible"
        group = self.fleet.pool(request).group
        if late:
            price = self.prices.of(group)
            price.refused_late()
            price.strain(now)
        if reason != "no_replica":
            self.fairness.refused(request.prompt_tokens, priced=why is Why.PRICED)
            self.told.refused(now, group, request.prompt_tokens, why is Why.PRICED, late)
            self.sticky.refuse(request.session, now + self.settings.sticky_shed_s)
        return Shed(request.id, reason, None if why is Why.HOPELESS else self._retry_after(tracked, now), best)

    def over(self, tracked: Tracked, outcome: Outcome, usage: Usage | None, now: float) -> None:
        """A dispatched attempt ended."""
        if not self.settings.working_set:
            return
        done = usage if outcome is Outcome.SUCCESS else None
        self.working_set.ended(tracked.request, done, now)
        if done is not None and done.cached_tokens is not None and tracked.last_context > 0.0:
            self.working_set.reported(min(tracked.last_context, tracked.request.prompt_tokens), done.cached_tokens)

    def forget_preferences(self, replica: Replica) -> None:
        """It is out: whoever waits for it is decided anew."""
        for tracked in [t for t in self.queue.everything() if t.preferred is replica]:
            self._unpark(tracked)

    # -- time and room -----------------------------------------------------------------------------------------

    def drain(self, now: float) -> list[Decision]:
        """Everything that room, time and deadlines allow right now."""
        if not self.queue.count:
            return []
        decisions = self._expire(now)
        looks = LOOKS
        while looks > 0 and self.queue.count and (open_to := self._with_room(now)):
            sent = False
            made: list[Decision] = []
            room: dict[int, float] = {}  # for newcomers, by pool
            for tracked in self.queue.in_order(now):
                if tracked.newcomer:
                    pool = self.fleet.pool(tracked.request)
                    if id(pool) not in room:
                        room[id(pool)] = self._newcomers_room(pool, now)
                    if tracked.request.prompt_tokens > room[id(pool)]:
                        continue
                    tracked.newcomer = False
                wanted = tracked.preferred
                if wanted is not None and wanted.id not in open_to and now - tracked.looked_at < LOOK_AGAIN_S:
                    continue
                looks -= 1
                pool = self.fleet.pool(tracked.request)
                choice = self._choose(tracked, pool, now)
                made, sent = self._send_if_room(tracked, pool, choice, now)
                decisions += made
                if sent:
                    break
                self._park(tracked, choice, now)
                if made or looks <= 0:  # what was taken back is in the queue again: start over
                    break
            if not sent and not made:
                break
            looks = LOOKS if sent else looks
        return decisions

    def next_wake(self, now: float) -> float | None:
        """When something may change without an event: a latest start, a bucket out of debt, a backlog worked off."""
        if not self.queue.count:
            return None
        while self._expiry and not self._expiry[0][2].held:
            heapq.heappop(self._expiry)
        soonest = self._expiry[0][0] if self._expiry else NEVER
        for replica in self.fleet.replicas.values():
            ready = self.room.ready_at(replica, now)
            soonest = min(soonest, ready) if ready > now else soonest
        return max(soonest, now + 0.001)

    def _expire(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        while self._expiry and self._expiry[0][0] <= now:
            _, _, tracked = heapq.heappop(self._expiry)
            if not tracked.held or tracked.latest_start > now:
                continue
            pool = self.fleet.pool(tracked.request)
            if not self.settings.admission or not tracked.service_class.sheddable or tracked.tried:
                decisions.append(self._send_least_late(tracked, pool, now))
                continue
            made, sent = self._send_if_room(tracked, pool, self._just_in_time(tracked, pool, now), now)
            decisions += made if sent else [*made, self.refuse(tracked, "infeasible", now)]
        return decisions

    def _just_in_time(self, tracked: Tracked, pool: Pool, now: float) -> Choice:
        """The last chance before a refusal: one with room, in time if the prediction holds without its margin. Margins
        are for queues: one learnt under load would refuse the longest prompts to a fleet at its ease; and who waits
        for streams to recover, since it harms least there, may wait in vain."""
        request, sight = tracked.request, self.sight
        due = NEVER if request.deadline is None else request.deadline - self._decode_s(tracked, pool)
        due = due if request.ttft_deadline is None else min(due, request.ttft_deadline)
        if due == NEVER or tracked.newcomer:
            return Choice(None)
        sight.look(pool, tracked, now)
        sight.hide(pool, [r for r in pool.open if now + r.ttft_s > due or not self.room.has(r, now)])
        return self.dispatcher.policy.choose(tracked.request, pool.view, now)

    def _send_least_late(self, tracked: Tracked, pool: Pool, now: float) -> Decision:
        """What may not be refused any more goes where it is least late."""
        choice = self._choose(tracked, pool, now, feasible_only=False)
        known = choice.replica_id is not None
        return self._send(tracked, pool, choice, now) if known else self.refuse(tracked, "no_replica", now)

    def _capacity(self, pool: Pool, now: float) -> float:
        """Prefill seconds per second that a pool is believed to serve for this gateway."""
        paced = self.settings.pacing
        return self.part * sum([r.pace.rate if paced and r.streams(now) else 1.0 for r in pool.open], 0.0)

    # -- one request -------------------------------------------------------------------------------------------

    def _choose(self, tracked: Tracked, pool: Pool, now: float, feasible_only: bool = True) -> Choice:
        sight, request = self.sight, tracked.request
        sight.look(pool, tracked, now)
        deadline = request.ttft_deadline
        if deadline is not None and feasible_only and self.settings.admission:
            left = deadline - now
            if sight.worst_ttft_s * LARGEST_MARGIN > left:
                margins, name = self.margins, request.service_class
                late = [r for r in pool.open if r.view.available and margins.bound(name, r.ttft_s) > left]
                if late and len(late) < len(pool.open):
                    sight.hide(pool, late)
        return self.dispatcher.policy.choose(request, pool.view, now)

    def _send_if_room(self, tracked: Tracked, pool: Pool, choice: Choice, now: float) -> tuple[list[Decision], bool]:
        """What that takes (its dispatch, and before it what makes way), and whether it was sent."""
        if choice.replica_id is None:
            return [], False
        room, replica, request = self.room, self.fleet.replicas[choice.replica_id], tracked.request
        fill = tracked.service_class.fill_only
        made: list[Decision] = []
        if replica.fill and not fill and self.settings.admission:
            made = self._take_back(replica, now)  # the engine would prefill it first
        if not room.has(replica, now) or (fill and not room.spare(replica, tracked, now)):
            return made, False
        price = self.prices.of(pool.group)
        if price.exempt and price.floods(request.tenant) and not room.left_over(replica, now):
            return made, False
        if replica.ledger.in_flight:  # an idle one takes any
            output = self.outputs.expected(request.service_class, request.max_tokens, request.expected_tokens)
            if not room.fits(tracked, replica, output, now):
                return made, False
        if made:
            replica.engine_ttft_s = replica.prefill.overhead_s + replica.ledger.backlog_s(now) + replica.service_s
        made.append(self._send(tracked, pool, choice, now))
        return made, True

    def _send(self, tracked: Tracked, pool: Pool, choice: Choice, now: float) -> Decision:
        price, long = self.prices.of(pool.group), False
        if tracked.held:
            if not tracked.service_class.fill_only and not tracked.tried:
                long = price.held(tracked.request.received_at, tracked.latest_start, now)
            self.leave(tracked)
        decision = self.dispatcher.dispatch(tracked, pool, choice, now)
        self.queue.charge(tracked, tracked.service_s, now)
        price.dispatched()
        self.told.dispatched(pool.group, long)
        if self.settings.working_set:
            tracked.last_context = self.working_set.began(tracked.request, now)
        return decision

    def _newcomers_room(self, pool: Pool, now: float) -> float:
        """Tokens of context a new conversation may bring."""
        working_set = self.working_set
        working_set.expire(now)
        if not working_set.enforced:
            return NEVER
        return working_set.headroom(sum([r.kv.capacity or 0.0 for r in pool.open], 0.0))

    def make_way(self, replica: Replica, now: float) -> list[Decision]:
        """When its streams lose their slack, what only fills and has not answered yet makes way."""
        if not replica.fill or not self.settings.admission or not self.room.must_clear(replica):
            return []
        return self._take_back(replica, now)

    def _take_back(self, replica: Replica, now: float) -> list[Decision]:
        """Fill-only requests there that have not answered yet return to the queue, each a bounded number of times."""
        decisions: list[Decision] = []
        for tracked in list(replica.fill.values()):
            if tracked.taken_back >= TAKEN_BACK:
                continue
            self.dispatcher.release(tracked, Outcome.CANCELLED, None, now)
            tracked.attempts -= 1
            tracked.forget_try(replica.id)
            replica.pace.spend(-tracked.service_s, now)
            tracked.taken_back += 1
            tracked.not_before = now + tracked.service_s  # whoever needs the place is prefilled first
            self.hold(tracked, Choice(None), now)
            self._look_at(tracked.not_before, tracked)
            decisions.append(Abort(tracked.request.id, "taken_back", requeue=True))
        return decisions

    def _with_room(self, now: float) -> set[str]:
        """Ids of the replicas that have some; until something is sent there that is so for all who wait."""
        room = self.room
        return {r.id for r in self.fleet.replicas.values() if room.has(r, now)}

    def _park(self, tracked: Tracked, choice: Choice, now: float) -> None:
        self._unpark(tracked)
        tracked.looked_at = now
        if choice.replica_id is not None:
            replica = self.fleet.replicas[choice.replica_id]
            tracked.preferred, tracked.parked_s = replica, replica.service_s
            replica.parked_s += tracked.parked_s
            replica.awaited += not tracked.service_class.fill_only
            tracked.service_s = tracked.parked_s

    def _unpark(self, tracked: Tracked) -> None:
        replica = tracked.preferred
        if replica is not None:
            replica.parked_s = max(0.0, replica.parked_s - tracked.parked_s)
            replica.awaited -= not tracked.service_class.fill_only
            tracked.preferred, tracked.parked_s = None, 0.0
        tracked.looked_at = -NEVER

    def _set_latest_start(self, tracked: Tracked, pool: Pool) -> None:
        """Deadline minus margin x the best service any open replica offers; from the views of the last look."""
        request, sight, settings = tracked.request, self.sight, self.settings
        tracked.service_s = sight.best_service_s
        margined = self.margins.bound(request.service_class, sight.best_start_s) if settings.admission else 0.0
        most = tracked.service_class.max_wait_s
        most = settings.default_max_wait_s if most is None else min(most, settings.default_max_wait_s)
        latest = request.received_at + most
        if request.ttft_deadline is not None and request.ttft_deadline - margined < latest:
            latest = request.ttft_deadline - margined
        if request.deadline is not None:
            latest = min(latest, request.deadline - margined - self._decode_s(tracked, pool))
        tracked.latest_start = latest

    def _decode_s(self, tracked: Tracked, pool: Pool) -> float:
        request = tracked.request
        if not request.generates:
            return 0.0
        tokens = self.outputs.expected(request.service_class, request.max_tokens, request.expected_tokens)
        return tokens * min((r.view.predicted_tpot_s for r in pool.open), default=0.0)

    def _due(self, tracked: Tracked) -> float:
        request = tracked.request
        if request.ttft_deadline is None:
            return request.deadline if request.deadline is not None else tracked.latest_start
        owed = self.fairness.excess(self.fairness.quartile(request.prompt_tokens)) > 0.0
        return request.received_at if owed else request.ttft_deadline

    def _retry_after(self, tracked: Tracked, now: float) -> float:
        """Predicted drain of what is held and of what was too much lately (all who were refused may return), with 20 %
        jitter so that they do not return together."""
        pool = self.fleet.pool(tracked.request)
        ahead = sum([r.parked_s + r.ledger.backlog_s(now) for r in pool.replicas], 0.0)
        drain = ahead / capacity if (capacity := self._capacity(pool, now)) > 0.0 else 1.0
        return max(1.0, drain + self.prices.of(pool.group).excess_s) * self.rng.uniform(0.8, 1.2)
