"""What the core thinks of a hand that has fallen silent: its requests are lost when its process is, and not before."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from gateway import hub
from gateway.config import build
from gateway.core_process import Core
from gateway.discovery.membership import Member
from gateway.hand_link import HandLink, Remote
from gateway.hub import Hub
from gateway.messages import To
from gateway.record import RequestRecord
from gateway.replica import Replica
from policies.model import Outcome, Request
from tests.gateway.running import until


@pytest.mark.plain
async def test_requests_are_lost_with_the_process_that_carried_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "LOST_AFTER_S", 0.001)
    process = subprocess.Popen(["sleep", "1000"])  # noqa: ASYNC220 (it starts at once)
    asked, ended = [], []

    def finished(record: RequestRecord) -> None:
        ended.append(record)

    core: Any = SimpleNamespace(hands=set(), lost_hands=0, finished=finished)

    def lost(hand: HandLink, remotes: list[Remote]) -> None:
        asked.append(hand)
        Hub._lost(core, hand, remotes)

    core._lost = lost
    hand = HandLink(1)
    hand.slot, hand.pid = 0, process.pid
    remote = Remote(hand, "r1", Request("1.r1", received_at=5.0), ("mine", 1e9, "/v1/chat/completions", "generate"))
    try:
        lost(hand, [remote])
        await until(lambda: len(asked) > 3)
        assert ended == [], "it may call again"
    finally:
        process.kill()
        process.wait()
    await until(lambda: len(ended) == 1)
    assert (ended[0].request_id, ended[0].outcome, ended[0].reason) == ("mine", Outcome.ERROR, "worker_lost")
    assert core.lost_hands == 1


@pytest.mark.plain
async def test_a_hand_that_called_again_has_lost_nothing() -> None:
    core: Any = SimpleNamespace(hands=set(), lost_hands=0)
    before, again = HandLink(1), HandLink(2)
    before.pid = again.pid = 2**22 + 1  # of no process
    core.hands.add(again)
    Hub._lost(core, before, [])
    assert core.lost_hands == 0


class Wire(asyncio.Transport):
    """Takes what the core tells a hand."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.told += orjson.loads(bytes(data[4:]))

    def close(self) -> None:
        pass


def core_with_a_hand() -> tuple[Core, Callable[[], list[list[str]]]]:
    """A core with one replica and a hand that it welcomed; and what tells the addresses of each fleet that the hand
    was told since it was asked last, without a turn of the loop between."""
    core = Core(build({"replicas": [{"url": "http://127.0.0.1:1", "id": "first", "models": ["m"]}]}), None, {})
    link, wire = core.proxy.accept(), Wire()
    link.connection_made(wire)
    next(iter(core.proxy.hands)).slot = 0
    core.proxy.welcome()

    def addresses() -> list[list[str]]:
        link.flush()
        told, wire.told = wire.told, []
        return [[row[1] for row in message[1][0]] for message in told if message[0] == To.FLEET]

    assert addresses() == [[]]
    return core, addresses


async def test_hands_know_a_new_replica_before_anything_is_sent_there() -> None:
    """What is held goes to a replica in the same step that takes it in; a hand that is told of such a dispatch before
    it knows the replica can only call it refused, and it was ejected at once."""
    core, addresses = core_with_a_hand()
    core.fleet.add(Replica("second", "http://127.0.0.1:2"))
    assert addresses() == [], "it serves nothing yet"
    core.fleet.learn("second", [{"id": "m"}])
    assert addresses() == [["http://127.0.0.1:2"]]
    await core.stop()


@pytest.mark.parametrize("known", [True, False])
async def test_a_core_that_follows_another_waits_for_a_hand_that_knows_it(known: bool) -> None:
    """However late that one calls; once all have called and are new as well, there is nobody to wait for."""
    core = Core(build({"workers": {"count": 2}}), None, {}, again=True)
    settling = asyncio.create_task(core.settle(asyncio.Event()))
    for slot in range(2):
        link = core.proxy.accept()
        link.connection_made(Wire())
        hand = next(hand for hand in core.proxy.hands if not hand.greeted)
        assert not core._recalled()
        seen = {"stream": {"commit_after_s": 11.0}, "workers": {"count": 2}} if known and slot else None
        core.proxy._hello(hand, [To.HELLO, slot, 1, 7, seen, [[], [], []], None])
    assert core._recalled()
    await settling
    assert core.config.stream.commit_after_s == (11.0 if known else 15.0)
    assert core.proxy.ready
    await core.stop()


async def test_a_core_that_has_to_leave_waits_for_no_hand() -> None:
    """The hands may have left already, and nobody else will call."""
    core = Core(build({"workers": {"count": 2}}), None, {}, again=True)
    leave = asyncio.Event()
    settling = asyncio.create_task(core.settle(leave))
    leave.set()
    await settling
    assert not core.proxy.ready
    await core.stop()


async def test_hands_hear_of_a_replica_that_moves() -> None:
    core, addresses = core_with_a_hand()
    table = core.control.config.replicas[0]
    core.members.told("configuration", [Member(table)])
    await asyncio.sleep(0)  # those of one turn are told together
    assert addresses()[-1] == ["http://127.0.0.1:1"]
    core.members.told("configuration", [Member(table.model_copy(update={"url": "http://127.0.0.1:3"}))])
    await asyncio.sleep(0)
    assert addresses()[-1:] == [["http://127.0.0.1:3"]]
    await core.stop()
