"""The core sends for few bodies at a time, and for none while it has enough to look at."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.hand_link import HandLink, Remote
from gateway.looks import Looks
from gateway.messages import To
from policies.model import Request
from tests.gateway.test_news import linked

TITLE = ["x", 1.0, "/v1/chat/completions", "generate"]
BODY = '{"model":"tiny","messages":[{"role":"user","content":"where is the sea"}]}'


class Wanting:
    """Wants to look into every prompt."""

    def __init__(self) -> None:
        self.busy = False
        self.looked: list[str] = []
        self.paid = 0  # times

    def spent(self, cpu_s: float) -> None:
        assert cpu_s >= 0.0
        self.paid += 1

    def arrived(self, request: Request) -> str:
        return f"arrival of {request.id}"

    def wants(self, arrival: str, body_bytes: int) -> bool:
        return True

    def look(self, api: str, document: Any, parts: list[bytes], request: Request, arrival: str) -> str:
        self.looked.append(request.id)
        return "looked"


async def test_two_bodies_are_on_their_way_and_the_next_is_sent_for_when_one_is_there_or_its_request_over() -> None:
    hand = HandLink(1)
    hand.link, written = linked()
    wanting: Any = Wanting()
    looks = Looks()
    remotes = [Remote(hand, f"r{n}", Request(f"1.r{n}", "tiny", chain=(n,)), TITLE) for n in range(7)]

    async def sent_for() -> list[str]:
        await asyncio.sleep(0)
        told = [message for frame in written.frames for message in frame]
        assert {message[0] for message in told} <= {To.LOOK}
        return [message[1] for message in told]

    for remote in remotes[:4]:
        looks.arrived(wanting, remote)
    assert await sent_for() == ["r0", "r1"]
    looks.came(wanting, remotes[1], "chat", BODY)
    assert (wanting.looked, wanting.paid, remotes[1].looked) == (["1.r1"], 1, "looked")
    looks.arrived(wanting, remotes[4])
    looks.arrived(wanting, remotes[5])
    assert await sent_for() == ["r0", "r1", "r4"]
    looks.over(remotes[0])
    wanting.busy = True
    looks.arrived(wanting, remotes[5])
    assert await sent_for() == ["r0", "r1", "r4"]
    wanting.busy = False
    looks.arrived(wanting, remotes[6])
    assert await sent_for() == ["r0", "r1", "r4", "r6"]
    assert remotes[5].arrival == "arrival of 1.r5", "what is not looked at is counted all the same"
