"""The scheduler of a hand: the same calls as the one in one process, decided by the core at the other end of a link.

Every submit and every failure is answered at once by the core, be it with a hold. Nothing for `answer_s` means that it
hangs: the link is dropped, and as after its death the hand decides by itself (`fallback.py`) what waits for an answer,
and after `PATIENCE_S` also what was held. It calls again all the while; a core that answers is told every open request
as it stands, so that its ledgers are whole again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from gateway.distribution import Distribution
from gateway.fallback import Fallback
from gateway.link import Link
from gateway.messages import (
    COMPLETE,
    FIRST,
    SUBMIT,
    Message,
    To,
    decision,
    of_record,
    of_request,
    of_usage,
    title,
)
from gateway.mirror import Mirror
from gateway.placement import Owner
from gateway.pulses import Meter
from gateway.record import RequestRecord
from policies.model import Abort, Decision, Dispatch, Hold, Outcome, Request, Shed, Usage

TICK_S = 0.05
PATIENCE_S = 1.0  # what was held waits this long for another core
MOST_KEPT = 10_000  # records that wait for a core
ANSWER_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.1, 1.0)
log = logging.getLogger("forebay.hand")


class Open:
    """One open request. `asked_at` is set while an answer of the core is due, `held` while it waits in its queue."""

    __slots__ = ("asked_at", "dispatched_at", "held", "known", "owner", "replica_id", "request", "started", "tried")

    def __init__(self, request: Request, owner: Owner) -> None:
        self.request = request
        self.owner = owner
        self.asked_at: float | None = None
        self.held = False
        self.replica_id: str | None = None
        self.dispatched_at = 0.0
        self.started = False
        self.tried: tuple[str, ...] = ()
        self.known = False  # the core has its request


class RemoteScheduler:
    """`placement.Placement` of a hand. `hung` is called when the core does not answer."""

    def __init__(
        self, fleet: Mirror, answer_s: float, hung: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fleet = fleet
        self.answer_s = answer_s
        self.clock = clock
        self.on_tick: Callable[[float], bool] | None = None
        self.meters: dict[str, Meter] = {}
        self.reads_prefix = True
        self.pressed = False  # requests are held, by any hand
        self.answers = Distribution(ANSWER_S)  # seconds from asking to the answer, since it was told last
        self.fallback = Fallback(fleet)
        self.local = 0  # decisions made here
        self._hung = hung
        self._link: Link | None = None
        self._open: dict[str, Open] = {}
        self._asked: dict[str, float] = {}  # in the order of asking
        self._refused: set[str] = set()  # shed by the core, which still knows them
        self._ending: Message | None = None  # a completion that its record joins
        self._kept: deque[Message] = deque(maxlen=MOST_KEPT)
        self._tick: asyncio.TimerHandle | None = None
        self._ticked_at = 0.0
        self._alone_since = clock()

    # -- the core comes and goes ---------------------------------------------------------------------------------

    @property
    def charges(self) -> bool:
        return self._link is not None

    @property
    def open(self) -> int:
        return len(self._open)

    def connected(self, link: Link) -> None:
        """A core answers: it is told everything that is open."""
        self._link, self.pressed = link, False
        self.fleet.alone = False
        for id, entry in self._open.items():
            if entry.replica_id is None:
                self._ask(id, entry, [SUBMIT, id, title(entry.owner.record), of_request(entry.request)])
            else:
                where = [entry.replica_id, entry.dispatched_at, entry.started]
                link.tell([To.ADOPT, id, title(entry.owner.record), of_request(entry.request), *where])
                entry.known = True
        for message in self._kept:
            link.tell(message)
        self._kept.clear()
        if self._open:
            self.tick()

    def alone(self) -> None:
        """The core is gone or hangs: what waits for its answer is decided here."""
        self._link, self.fleet.alone, self._alone_since = None, True, self.clock()
        asked, self._asked = self._asked, {}
        self._refused.clear()
        for entry in self._open.values():
            entry.known = False
        for id in asked:
            entry_ = self._open.get(id)
            if entry_ is not None:
                entry_.asked_at = None
                self._decide(entry_)

    def owner(self, request_id: str) -> Owner | None:
        """Who waits for decisions about an open request."""
        entry = self._open.get(request_id)
        return None if entry is None else entry.owner

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, request: Request, owner: Owner) -> None:
        entry = self._open[request.id] = Open(request, owner)
        self.tick()
        if self._link is None:
            self._decide(entry)
        else:
            self._ask(request.id, entry, [SUBMIT, request.id, title(owner.record), of_request(request)])

    def first_token(self, request_id: str, replica_id: str) -> None:
        entry = self._open.get(request_id)
        if entry is not None:
            entry.started = True
            self._news([FIRST, request_id])

    def failed(self, request_id: str, outcome: Outcome) -> None:
        entry = self._open.get(request_id)
        if entry is None:
            return
        self._off(entry)
        if self._link is None:
            self._decide(entry)
        else:
            self._ask(request_id, entry, [To.FAILED, request_id, outcome])

    def complete(self, request_id: str, outcome: Outcome, usage: Usage | None, replica_id: str | None) -> None:
        entry = self._open.pop(request_id, None)
        self._asked.pop(request_id, None)
        self._end()
        if entry is None:  # it was shed
            if request_id in self._refused:
                self._refused.discard(request_id)
                self._ending = [COMPLETE, request_id, outcome, None, None]
            return
        self._off(entry)
        if entry.known:
            self._ending = [COMPLETE, request_id, outcome, of_usage(usage), replica_id]

    def recorded(self, record: RequestRecord) -> None:
        """What the client saw of the request that was completed just now, or of one that never got so far."""
        ending, self._ending = self._ending, None
        if ending is not None and self._link is not None:
            ending.append(of_record(record, whole=False))
            self._news(ending)
        else:
            self._news([To.RECORD, of_record(record, whole=True)], keep=True)

    def dispatched(self, replica_id: str) -> Meter:
        meter = self.meters.get(replica_id)
        if meter is None:
            meter = self.meters[replica_id] = Meter(replica_id)
        meter.prefilling = True  # with this request; the core says when it is over
        return meter

    def heard(self, message: Message) -> None:
        """A decision of the core."""
        self._decided(decision(message))

    def tick(self) -> None:
        if self._tick is None:
            self._ticked_at = self.clock()
            self._tick = asyncio.get_running_loop().call_later(TICK_S, self._ticked)

    def stop(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None

    # -- inside --------------------------------------------------------------------------------------------------

    def _news(self, message: Message, keep: bool = False) -> None:
        """Told at once only while requests are held: they wait for what it may set free."""
        if self._link is not None:
            if self.pressed:
                self._link.tell(message)
            else:
                self._link.mention(message)
        elif keep:
            self._kept.append(message)

    def _end(self) -> None:
        """A completion whose record never came."""
        ending, self._ending = self._ending, None
        if ending is not None:
            self._news([*ending, None])

    def _ask(self, id: str, entry: Open, message: Message) -> None:
        assert self._link is not None
        self._link.tell(message)
        entry.known = True
        entry.held = False
        self._asked[id] = entry.asked_at = self.clock()

    def _off(self, entry: Open) -> None:
        if entry.replica_id is not None:
            self.fallback.over(entry.replica_id)
            entry.tried = (*entry.tried, entry.replica_id)
            entry.replica_id = None
        entry.started = False

    def _decide(self, entry: Open) -> None:
        self.local += 1
        self._decided(self.fallback.decide(entry.request, entry.tried))

    def _decided(self, decision: Decision) -> None:
        id = decision.request_id
        entry = self._open.get(id)
        if entry is None:
            return  # its client left, and the core has been told
        if self._asked and self._asked.pop(id, None) is not None and entry.asked_at is not None:
            self.answers.add(self.clock() - entry.asked_at)
            entry.asked_at = None
        if isinstance(decision, Dispatch):
            if entry.replica_id is not None:
                return  # an order that crossed with `KEEP`
            entry.replica_id, entry.dispatched_at, entry.held = decision.replica_id, self.clock(), False
            self.fallback.sent(decision.replica_id)
        elif isinstance(decision, Hold):
            entry.held = True
        elif isinstance(decision, Abort) and decision.requeue:
            if entry.started:
                assert entry.replica_id is not None
                if self._link is not None:
                    self._link.tell([To.KEEP, id, entry.replica_id])
                return
            before = entry.tried
            self._off(entry)
            entry.tried, entry.held = before, True  # it did not fail there, and may go there again
        elif isinstance(decision, Shed):
            del self._open[id]
            if entry.known:
                self._refused.add(id)
        entry.owner.on_decision(decision)

    def _ticked(self) -> None:
        now = self.clock()
        late = now - self._ticked_at > 2 * TICK_S  # then answers may lie unread
        self._tick = None
        for meter in self.meters.values():
            if meter.stirred:
                events = meter.idle_gaps + meter.busy_gaps
                p = meter.pulse(now)
                told = [p.live, p.near, p.least_slack_s, p.idle_gaps, p.idle_gap_sum_s, p.busy_gaps, p.busy_gap_sum_s]
                self._news([To.PULSE, meter.replica_id, events, *told])
        if self._link is None:
            if now - self._alone_since > PATIENCE_S:
                for entry in [e for e in self._open.values() if e.held]:
                    entry.held = False
                    self._decide(entry)
        elif self._asked and not late and now - next(iter(self._asked.values())) > self.answer_s:
            log.error("the core has not answered for %g s; deciding alone", self.answer_s)
            self._hung()
        busy = self.on_tick(now) if self.on_tick is not None else False
        if busy or self._open:
            self.tick()
