"""What the core thinks of a hand that has fallen silent: its requests are lost when its process is, and not before."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from gateway import hub
from gateway.hand_link import HandLink, Remote
from gateway.hub import Hub
from gateway.record import RequestRecord
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
