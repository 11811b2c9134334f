"""The core's end of the hands: what a `Proxy` is to one process, for requests whose bytes are in others.

Hands announce, the core decides. A hand that is gone takes its requests with it: each is cancelled here, so nothing
stays charged, and leaves a record that says so. Pulses of all hands are gathered to one per replica. What hands must
know of the fleet and the configuration goes to all of them when it changes, and what changes often
(`news.py`). A core that was restarted learns from the first hand that calls what the one before it had last:
the running configuration and the state of the fleet.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, TypeAlias

from gateway import mirror
from gateway.config import Config
from gateway.errors import GatewayError
from gateway.fleet import Fleet
from gateway.gathered import Gathered
from gateway.hand_link import HandLink, Remote
from gateway.link import Link
from gateway.looks import Looks
from gateway.messages import (
    COMPLETE,
    FIRST,
    SUBMIT,
    Message,
    To,
    known_record,
    outcome,
    request,
    unknown_record,
    usage,
)
from gateway.news import News
from gateway.proxy import Proxy
from gateway.record import RequestRecord
from gateway.scheduler import Scheduler
from gateway.signals import Sign
from gateway.tenants import Tenants
from gateway.trial import late
from policies.designs import Assignment
from policies.learnt import learnt
from policies.model import Outcome, Pulse, Request
from policies.objectives import Partition

STALE_S = 3.0  # age of a hand's state above which it does not count
LOST_AFTER_S = 2.0  # a hand that lives mostly calls again sooner
LOST = "worker_lost"  # reason in the record of a request that went with its hand
log = logging.getLogger("forebay.core")
TEACH_S = 5.0  # between two times that the hands are told what was learnt
Ask = Callable[[HandLink, Message], None]
Before: TypeAlias = tuple[int, Mapping[str, Any], mirror.View, Mapping[str, Any] | None]


class Hub(Proxy):
    """Owner of the hands' links."""

    def __init__(  # as its base's: handed on as *args, mypyc mixes them up
        self,
        scheduler: Scheduler,
        fleet: Fleet,
        config: Config,
        sink: Callable[[RequestRecord], None],
        tenants: Tenants | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(scheduler, fleet, config, sink, tenants, rng)
        self.core = scheduler
        self.hands: set[HandLink] = set()
        self.lost_hands = 0
        self.ask: Ask | None = None  # a request for the control plane
        self.ready = False  # to decide; hands that call before wait
        self.before: Before | None = None  # what hands know of a core before this
        self.number = 1  # of the configuration
        self._numbers = count(1)
        self.taught_at: float | None = None  # when the hands were told last what was learnt
        self.looks = Looks()
        self.news = News(self.core, self.hands)
        self._fleet_dirty = False
        self.server: asyncio.Server | None = None  # where they call
        self._does: dict[int, Callable[[HandLink, Message], None]] = {
            To.FAILED: self._failed,
            To.PULSE: self._pulse,
            To.SIGN: lambda hand, m: self.fleet.observed(m[1], Sign(m[2])),
            To.RECORD: self._record,
            To.ASK: lambda hand, m: self.ask(hand, m) if self.ask is not None else None,
            To.STATE: self._state,
            To.MADE: self._made,
            To.ADOPT: self._adopt,
            To.KEEP: self._keep,
            To.HELLO: self._hello,
            To.BODY: self._body,
        }

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.news.stop()
        for hand in list(self.hands):
            hand.link.close()
        super().close()

    # -- what the rest of the core asks ----------------------------------------------------------------------------

    @property
    def open(self) -> int:
        return sum([int(hand.state.get("open", 0)) for hand in self.hands], 0)

    @property
    def overloaded(self) -> bool:
        return any(hand.state.get("shedding", False) for hand in self.hands)

    def held(self) -> list[Any]:
        return [remote for hand in self.hands for remote in hand.open.values() if remote.held]

    def late_requests(self, now: float) -> Iterator[tuple[Assignment, float]]:
        for hand in self.hands:
            for remote in hand.open.values():
                if remote.assignment is not None and not remote.begun and late(remote.request, now):
                    yield remote.assignment, now - remote.request.received_at

    def awaits(self, replica_id: str) -> int:
        return sum([hand.awaits.get(replica_id, 0) for hand in self._fresh()], 0)

    def silent(self, replica_id: str, for_s: float) -> int:
        """As each hand counted them with the running configuration's `hang_s`."""
        return sum([hand.silent.get(replica_id, 0) for hand in self._fresh()], 0)

    def _fresh(self) -> list[HandLink]:
        now = time.monotonic()
        return [hand for hand in self.hands if now - hand.state.get("at", 0.0) < STALE_S]

    def give_up_on(self, replica_id: str, silent_since: float = 0.0) -> None:
        self.tell_all([To.GIVE_UP, replica_id, silent_since])

    def configure(self, config: Config, tenants: Tenants) -> None:
        super().configure(config, tenants)
        if hasattr(self, "hands"):  # not while the base class starts
            self.number += 1
            self.tell_all(self._configuration(To.CONFIG))
            self.fleet_changed()

    def policy_changed(self) -> None:
        self.tell_all(self._configuration(To.CONFIG))

    def fleet_changed(self) -> None:
        if not self._fleet_dirty:
            self._fleet_dirty = True
            asyncio.get_running_loop().call_soon(self.show_fleet)

    def lagged(self, mean_s: float) -> None:
        """The core's own lag closes the hands' doors too."""
        self.door.lagged(mean_s)
        if mean_s > 0.01 or self.door.shedding:
            self.tell_all([To.LAG, mean_s])

    def tell_all(self, message: Message) -> None:
        for hand in self.hands:
            if hand.greeted and self.ready:
                hand.link.tell(message)

    # -- hands come and go -----------------------------------------------------------------------------------------

    def accept(self) -> Link:
        """A hand calls."""
        hand = HandLink(next(self._numbers))
        hand.considered = self.considered
        hand.link = Link(lambda message: self._heard(hand, message), lambda: self._gone(hand))
        self.hands.add(hand)
        return hand.link

    def _hello(self, hand: HandLink, message: Message) -> None:
        _, hand.slot, hand.pid, number, document, seen, known = message
        if document is not None and (self.before is None or self.before[0] < number):
            self.before = (number, document, seen, known)
        if self.ready:
            self._welcome(hand)

    def welcome(self) -> None:
        """The core is ready to decide."""
        self.ready = True
        for hand in self.hands:
            if hand.greeted:
                self._welcome(hand)

    def _welcome(self, hand: HandLink) -> None:
        hand.link.tell([To.FLEET, mirror.view(self.fleet)])
        hand.link.tell(self._configuration(To.WELCOME))
        self.news.greeted(hand)

    def _gone(self, hand: HandLink) -> None:
        self.hands.discard(hand)
        for meter in self.core.meters.values():
            if isinstance(meter, Gathered):
                meter.forget(hand.number)
        remotes, hand.open = hand.open, {}
        now = time.monotonic()
        for remote in remotes.values():
            replica_id = None if remote.last is None else remote.last.replica_id
            self.core.complete(remote.request.id, Outcome.CANCELLED, None, replica_id)
            remote.left(now)
            self.looks.over(remote)
        if remotes and self.server is not None:
            asyncio.get_running_loop().call_later(LOST_AFTER_S, self._lost, hand, list(remotes.values()))

    def _lost(self, hand: HandLink, remotes: list[Remote]) -> None:
        """Unless it is the same process that called again or still may, its requests went with it."""
        if any(other.pid == hand.pid for other in self.hands):
            return
        if hand.lives:  # where all are short of CPU it may take long to call
            asyncio.get_running_loop().call_later(LOST_AFTER_S, self._lost, hand, remotes)
            return
        self.lost_hands += 1
        log.warning("hand %d (pid %d) is gone, and %d requests with it", hand.slot, hand.pid, len(remotes))
        now = time.monotonic()
        for remote in remotes:
            finished = remote.record
            finished.outcome, finished.partition = Outcome.ERROR, Partition.ERROR_TRANSPORT
            finished.reason, finished.ended_at = LOST, now
            self.finished(finished)

    def _configuration(self, kind: To) -> Message:
        return [kind, self.number, self.config.model_dump(mode="json"), self.core.reads_prefix]

    def show_fleet(self) -> None:
        """At once, ahead of what is told after it."""
        self._fleet_dirty = False
        self.tell_all([To.FLEET, mirror.view(self.fleet)])

    # -- what hands say --------------------------------------------------------------------------------------------

    def _heard(self, hand: HandLink, message: Message) -> None:
        kind: int = message[0]
        if kind == SUBMIT:
            self._submit(hand, message)
        elif kind == COMPLETE:
            self._complete(hand, message)
        elif kind == FIRST:
            self._first(hand, message)
        else:
            self._does[kind](hand, message)

    def _named(self, hand: HandLink, id: str, values: Message) -> Request:
        return request(f"{hand.number}.{id}", values)

    def _submit(self, hand: HandLink, message: Message) -> None:
        _, id, title, values = message
        made = self._named(hand, id, values)
        remote = hand.open[id] = Remote(hand, id, made, title)
        if made.tenant is not None and not self.core.charges:
            tenant = self.tenants.by_name.get(made.tenant)
            try:
                remote.lease = self.tenants.admit(tenant, made.prompt_tokens + (made.max_tokens or 0), time.monotonic())
            except GatewayError as error:
                remote.refuse(error)
                return
        if self.experiment is not None:
            remote.assignment = self.experiment.assign(made, time.time())
        if self.prefixes is not None and made.chain:
            self.looks.arrived(self.prefixes, remote)
        self.core.submit(made, remote)
        if remote.last is not None:
            self.news.touched(remote.last.replica_id)
        else:
            self.news.pressed()

    def _body(self, hand: HandLink, message: Message) -> None:
        _, id, api, body = message
        remote = hand.open.get(id)
        if remote is not None:
            self.looks.came(self.prefixes, remote, api, body)

    def _first(self, hand: HandLink, message: Message) -> None:
        remote = hand.open.get(message[1])
        if remote is not None and remote.last is not None:
            remote.begun = True
            replica_id = remote.last.replica_id
            self.core.first_token(remote.request.id, replica_id)
            self.fleet.observed(replica_id, Sign.OK)
            self.news.touched(replica_id)

    def _failed(self, hand: HandLink, message: Message) -> None:
        remote = hand.open.get(message[1])
        if remote is None:
            return
        before = remote.last
        if self.core.balancer.is_open(remote.request.id):
            self.core.failed(remote.request.id, outcome(message[2]))
        else:  # it ran where this core never knew a replica
            self.core.complete(remote.request.id, Outcome.CANCELLED, None, None)
            self.core.submit(remote.request, remote)
        self.news.pressed()
        if before is not None:
            self.news.touched(before.replica_id)

    def _complete(self, hand: HandLink, message: Message) -> None:
        _, id, ended, told, replica_id, seen = message
        remote = hand.open.pop(id, None)
        if remote is None:
            return
        self.looks.over(remote)
        said = usage(told)
        self.core.complete(remote.request.id, outcome(ended), said, replica_id)
        if replica_id is not None:
            self.news.touched(replica_id)
        finished: RequestRecord | None = None
        if seen is not None:
            finished = known_record(seen, remote.record, remote.last)
            finished.assignment, finished.shadows = remote.assignment, remote.request.shadows
            finished.alternatives = remote.considered or finished.alternatives
            if remote.arrival is not None:
                finished.cacheable_tokens, finished.sampled = remote.arrival.cacheable_tokens, remote.looked
        if remote.lease is not None:
            remote.lease.settle(None if finished is None else finished.charged_tokens, time.monotonic())
        if finished is not None:
            self._fared_well(finished)
            if said is not None and replica_id is not None and finished.outcome is Outcome.SUCCESS:
                self._meter(replica_id).ended(finished.content_events, said.completion_tokens)
            self.finished(finished)

    def _fared_well(self, finished: RequestRecord) -> None:
        """What a good answer says about its replica, unless its first token has said it."""
        replica_id = finished.replica_id
        if replica_id is not None and finished.outcome is Outcome.SUCCESS and not finished.content_events:
            self.fleet.observed(replica_id, Sign.OK)

    def _record(self, hand: HandLink, message: Message) -> None:
        """Of a request that was never asked about."""
        finished = unknown_record(message[1])
        self._fared_well(finished)
        self.finished(finished)

    def _pulse(self, hand: HandLink, message: Message) -> None:
        _, replica_id, events, *values = message
        meter = self._meter(replica_id)
        meter.heard(hand.number, events, Pulse(*values), time.monotonic())
        self.core.tick()
        known = hand.per_event.get(replica_id, 1.0)
        if abs(meter.tokens_per_event - known) > 0.01 * known:
            hand.per_event[replica_id] = meter.tokens_per_event
            hand.link.mention([To.METER, replica_id, meter.tokens_per_event])

    def _meter(self, replica_id: str) -> Gathered:
        meter = self.core.meters.get(replica_id)
        if not isinstance(meter, Gathered):
            meter = self.core.meters[replica_id] = Gathered(replica_id)
        return meter

    def _state(self, hand: HandLink, message: Message) -> None:
        state = message[1]
        hand.awaits, hand.silent = state.pop("awaits"), state.pop("silent")
        for of, refused in state.pop("refused").items():
            self.door.refused[of] += refused
        state["at"] = time.monotonic()
        hand.state = state
        if self.taught_at is None or state["at"] - self.taught_at > TEACH_S:
            self.taught_at = state["at"]
            self.tell_all([To.LEARNT, learnt(self.core.balancer.dispatcher)])
        self.door.receiving_bytes = sum([h.state.get("receiving_bytes", 0) for h in self.hands], 0)

    def _made(self, hand: HandLink, message: Message) -> None:
        self.made(message[1], message[2])
        for other in self.hands:
            if other is not hand and other.greeted:
                other.link.tell(message)

    def _adopt(self, hand: HandLink, message: Message) -> None:
        _, id, title, values, replica_id, since, started = message
        made = self._named(hand, id, values)
        remote = hand.open[id] = Remote(hand, id, made, title)
        if made.tenant is not None and (tenant := self.tenants.by_name.get(made.tenant)) is not None:
            remote.lease = tenant.resume(made.prompt_tokens + (made.max_tokens or 0))
        self._take(remote, replica_id, since, started)

    def _take(self, remote: Remote, replica_id: str, since: float, started: bool) -> None:
        remote.ran_on(replica_id)
        self.core.adopt(remote.request, remote, replica_id, since, started)
        self.news.touched(replica_id)

    def _keep(self, hand: HandLink, message: Message) -> None:
        remote = hand.open.get(message[1])
        if remote is not None:
            self.core.complete(remote.request.id, Outcome.CANCELLED, None, None)
            self._take(remote, message[2], time.monotonic(), True)
