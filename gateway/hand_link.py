"""The core's view of one hand: its link, its open requests, and what it said about itself last."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from gateway.errors import GatewayError
from gateway.link import Link
from gateway.messages import Message, of_decision, titled
from gateway.prefixes import Looked
from gateway.record import RequestRecord
from gateway.tenants import Lease
from policies.designs import Assignment
from policies.families import Arrival
from policies.model import Abort, Alternative, Decision, Dispatch, Hold, Request, Shed


def _nothing(request: Request) -> tuple[Alternative, ...]:
    return ()


class HandLink:
    """`slot` is its place among the hands, `number` never repeats. Requests are named by number and the hand's id."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.slot = -1
        self.pid = 0
        self.link: Link  # set by whoever makes both
        self.open: dict[str, Remote] = {}
        self.prefilling: dict[str, bool] = {}  # what it believes of each replica
        self.per_event: dict[str, float] = {}
        self.awaits: dict[str, int] = {}
        self.silent: dict[str, int] = {}
        self.state: dict[str, Any] = {}
        self.considered: Callable[[Request], tuple[Alternative, ...]] = _nothing

    @property
    def greeted(self) -> bool:
        return self.slot >= 0

    @property
    def lives(self) -> bool:
        """Whether there is a process of that number. Ours: the supervisor reaps those that ended."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


class Remote:
    """`placement.Owner` of a request whose bytes are in a hand. `title`: what the client calls it, and what it asked
    for."""

    __slots__ = (
        "arrival", "assignment", "begun", "considered", "hand", "held", "id", "last", "lease", "looked", "request",
        "title",
    )  # fmt: skip

    def __init__(self, hand: HandLink, id: str, request: Request, title: Message) -> None:
        self.hand = hand
        self.id = id
        self.request = request
        self.title = title
        self.lease: Lease | None = None
        self.last: Dispatch | None = None
        self.held = False
        self.begun = False  # its first token was seen
        self.assignment: Assignment | None = None  # in the experiment that ran when it came
        self.arrival: Arrival | None = None  # what was known of its prompt
        self.looked: Looked | None = None  # into its prompt
        self.considered: tuple[Alternative, ...] = ()  # what it could have had when it was refused

    @property
    def record(self) -> RequestRecord:
        """What is known of it: for the list of held requests, and for the journal when its hand is gone."""
        return titled(self.title, self.request)

    def on_decision(self, decision: Decision) -> None:
        if isinstance(decision, Dispatch):
            self.last, self.held = decision, False
            self.hand.prefilling[decision.replica_id] = True  # as the hand will believe
        else:
            self.held = isinstance(decision, Hold) or (isinstance(decision, Abort) and decision.requeue)
            if isinstance(decision, Shed):
                self.considered = self.hand.considered(self.request)
        self.hand.link.tell(of_decision(self.id, decision))

    def ran_on(self, replica_id: str) -> None:
        """Another decided that, before this core or against it."""
        self.last, self.held = Dispatch(self.id, replica_id, "adopted"), False
        self.hand.prefilling[replica_id] = True

    def left(self, now: float) -> None:
        """Its hand is gone. Where it calls again, it asks again for what was not dispatched, and tells of the rest."""
        if self.lease is not None:
            if self.last is None:
                self.lease.give_back(now)
            else:
                self.lease.settle(None, now)

    def refuse(self, error: GatewayError) -> None:
        self.on_decision(Shed(self.id, error.code, error.retry_after_s, said=error.message))
