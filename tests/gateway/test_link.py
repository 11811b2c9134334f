"""Two ends of a link over a real socket, one of which reads late."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.link import Link
from tests.gateway.running import until

KILOBYTE = "x" * 1000


@dataclass
class End:
    """What one end has heard, and how often it was told of the other's end."""

    heard: list[Any] = field(default_factory=list)
    lost: int = 0
    link: Link = field(init=False)

    def __post_init__(self) -> None:
        self.link = Link(self.heard.append, self._ended)

    def _ended(self) -> None:
        self.lost += 1


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[tuple[End, End]]:
    """A hand's end and the core's."""
    hand, core = End(), End()
    loop, path = asyncio.get_running_loop(), os.fspath(tmp_path / "core.sock")
    server = await loop.create_unix_server(lambda: cast(Any, core.link), path)
    await loop.create_unix_connection(lambda: cast(Any, hand.link), path)
    await until(lambda: core.link.alive)
    yield hand, core
    hand.link.drop()
    core.link.drop()
    server.close()
    await server.wait_closed()


def transport(end: End) -> Any:
    return end.link._transport


async def test_what_was_told_before_a_hand_left_arrives_at_a_core_that_was_only_slow(ends: tuple[End, End]) -> None:
    hand, core = ends
    transport(core).pause_reading()
    for number in range(2000):
        hand.link.tell([number, KILOBYTE])
    await asyncio.sleep(0)
    assert transport(hand).get_write_buffer_size() > 0, "more than the kernel takes"
    hand.link.tell([2000, "in this turn"])
    hand.link.leave()
    hand.link.tell([2001, "nobody is told this any more"])
    for number in range(2000):  # what it says before it knows does not end what it has not read
        core.link.tell([number, KILOBYTE])
    await asyncio.sleep(0)
    transport(core).resume_reading()
    await until(lambda: core.lost == 1)
    assert [message[0] for message in core.heard] == list(range(2001))
    await until(lambda: not hand.link.alive)
    assert (hand.heard, hand.lost) == ([], 0)


async def test_a_link_that_is_closed_delivers_and_may_be_left_after_that(ends: tuple[End, End]) -> None:
    hand, core = ends
    hand.link.tell([1, "told"])
    hand.link.close()
    await until(lambda: core.lost == 1)
    assert core.heard == [[1, "told"]]
    hand.link.leave()  # it is closing or closed: nothing is left to do
    await until(lambda: not hand.link.alive)


@given(cuts=st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_messages_are_the_same_however_their_bytes_are_cut(cuts: list[int]) -> None:
    sent = [[1, "a"], [2, "b" * 300], [3, list(range(50))], [4, None], [5, {"c": "d" * 700}]]
    frames = [sent[:2], sent[2:3], [], sent[3:]]
    wire = b"".join(
        [len(frame).to_bytes(4, "little") + frame for frame in [orjson.dumps(messages) for messages in frames]]
    )
    end, at = End(), 0
    for size in itertools.cycle(cuts):
        if at >= len(wire):
            break
        end.link.data_received(wire[at : at + size])
        at += size
    assert end.heard == sent
