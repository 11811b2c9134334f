"""News between hands and core wait for what is told next, unless requests are held: then an end is told at once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import orjson

from gateway import link as links
from gateway.hand_link import HandLink
from gateway.link import Link
from gateway.messages import To
from gateway.mirror import Mirror
from gateway.news import News
from gateway.record import RequestRecord
from gateway.remote import RemoteScheduler
from gateway.scheduler import Scheduler
from gateway.signals import Sign
from policies import registry
from policies.core import Balancer
from policies.model import Decision, Dispatch, Outcome, Request
from policies.settings import Settings
from tests.gateway.running import until


class Written(asyncio.Transport):
    """Takes what a link writes, one frame a write."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[list[Any]] = []

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.frames.append(orjson.loads(bytes(data[4:])))

    def abort(self) -> None:
        pass

    @property
    def kinds(self) -> list[list[To]]:
        """Of the messages of each write."""
        return [[To(message[0]) for message in frame] for frame in self.frames]


def linked() -> tuple[Link, Written]:
    link, written = Link(lambda message: None, lambda: None), Written()
    link.connection_made(written)
    return link, written


class Owner:
    def __init__(self) -> None:
        self.record = RequestRecord("x-1", 1.0)
        self.decisions: list[Decision] = []

    def on_decision(self, decision: Decision) -> None:
        self.decisions.append(decision)


def serve(hand: RemoteScheduler, id: str) -> None:
    """One request from its submission to its record."""
    owner = Owner()
    hand.submit(Request(id, received_at=1.0), owner)
    hand.heard([To.DISPATCH, id, "r0", "turn", None])
    assert [type(one) for one in owner.decisions] == [Dispatch]
    hand.complete(id, Outcome.SUCCESS, None, "r0")
    hand.recorded(owner.record)


async def test_an_end_leaves_with_the_next_request() -> None:
    hand = RemoteScheduler(Mirror(lambda id, sign: None), 1.0, lambda: None)
    link, written = linked()
    hand.connected(link)
    serve(hand, "a")
    await asyncio.sleep(0)  # the request was asked about in this turn, and takes its end along
    assert written.kinds == [[To.SUBMIT, To.COMPLETE]]
    hand.first_token("b", "r0")  # of none that is open
    serve(hand, "b")
    serve(hand, "c")
    await asyncio.sleep(0)
    assert written.kinds[1:] == [[To.SUBMIT, To.COMPLETE, To.SUBMIT, To.COMPLETE]]
    hand.stop()


async def test_an_end_that_nothing_follows_leaves_by_itself() -> None:
    hand = RemoteScheduler(Mirror(lambda id, sign: None), 1.0, lambda: None)
    link, written = linked()
    hand.connected(link)
    hand.submit(Request("a", received_at=1.0), owner := Owner())
    await asyncio.sleep(0)
    hand.heard([To.DISPATCH, "a", "r0", "turn", None])
    hand.first_token("a", "r0")
    hand.complete("a", Outcome.SUCCESS, None, "r0")
    hand.recorded(owner.record)
    await asyncio.sleep(0)
    assert written.kinds == [[To.SUBMIT]], "nobody waits for it"
    await until(lambda: len(written.frames) > 1)
    assert written.kinds == [[To.SUBMIT], [To.FIRST, To.COMPLETE]]
    hand.stop()


async def test_while_requests_are_held_an_end_leaves_in_its_own_turn() -> None:
    hand = RemoteScheduler(Mirror(lambda id, sign: None), 1.0, lambda: None)
    link, written = linked()
    hand.connected(link)
    hand.submit(Request("a", received_at=1.0), owner := Owner())
    await asyncio.sleep(0)
    hand.pressed = True
    hand.complete("a", Outcome.SUCCESS, None, "r0")
    hand.recorded(owner.record)
    await asyncio.sleep(0)
    assert written.kinds == [[To.SUBMIT], [To.COMPLETE]]
    again, _ = linked()
    hand.connected(again)
    assert not hand.pressed, "another core says so itself"
    hand.stop()


class Holding(Scheduler):
    waiting = 0

    @property
    def held(self) -> int:
        return self.waiting


async def test_hands_are_told_once_that_requests_are_held_and_once_that_none_is() -> None:
    scheduler = Holding(Balancer({}, registry.make("round_robin"), Settings().without_science(), random.Random(0)))
    hands = [HandLink(1), HandLink(2), HandLink(3)]
    told = []
    for slot, hand in enumerate(hands):
        hand.link, written = linked()
        hand.slot = slot
        told.append(written)
    hands[2].slot = -1  # it has not said who it is
    news = News(scheduler, hands)
    news.pressed()
    assert [written.frames for written in told] == [[], [], []]
    scheduler.waiting = 1
    for _ in range(5):
        news.pressed()
    await asyncio.sleep(0)
    assert [written.frames for written in told] == [[[[To.PRESSED, True]]], [[[To.PRESSED, True]]], []]
    hands[2].slot = 2
    news.greeted(hands[2])
    await asyncio.sleep(0)
    assert told[2].frames == [[[To.PRESSED, True]]]
    scheduler.waiting = 0
    await until(lambda: all(len(written.frames) == 2 for written in told))
    assert [written.frames[1] for written in told] == [[[To.PRESSED, False]]] * 3
    news.stop()


def test_of_a_replica_only_bad_signs_are_told() -> None:
    """A good one goes with the first token or the end of a request."""
    told = []
    mirror = Mirror(lambda id, sign: told.append((id, sign)))
    for sign in (Sign.OK, Sign.RESET, Sign.OK):
        mirror.observed("r0", sign)
    assert told == [("r0", Sign.RESET)]


async def test_a_mention_does_not_hold_up_what_is_told_after_it() -> None:
    link, written = linked()
    link.mention([To.FIRST, "a"])
    link.tell([To.SUBMIT, "b"])
    link.mention([To.FIRST, "c"])
    await asyncio.sleep(0)
    assert written.frames == [[[To.FIRST, "a"], [To.SUBMIT, "b"], [To.FIRST, "c"]]]
    link.mention([To.FIRST, "d"])  # the timer of "a" still runs, and takes it
    await until(lambda: len(written.frames) == 2)
    assert written.frames[1] == [[To.FIRST, "d"]]
    link.mention([To.FIRST, "e"])
    link.drop()
    await asyncio.sleep(2 * links.MENTION_S)  # its timer, if it had one, comes before this one
    assert len(written.frames) == 2, "what was not sent goes with the link"
