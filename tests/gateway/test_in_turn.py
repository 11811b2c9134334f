"""Many of one kind at the same moment take turns with everybody else: nobody's stream waits for all of them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from gateway import watch as watching
from gateway.fetch import Fetcher
from gateway.fleet import Fleet
from gateway.replica import Replica
from gateway.sections import Health, Scrape
from gateway.watch import AT_ONCE, Watch
from tests.gateway.running import running, until


async def test_of_a_hundred_new_replicas_a_few_are_asked_at_once_and_the_others_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    turns = 0

    def counted(replica: Replica) -> Fetcher:
        made.append(replica.id)
        in_turn.append(turns)
        return Fetcher(replica)

    in_turn: list[int] = []
    monkeypatch.setattr(watching, "Fetcher", counted)
    fleet = Fleet(Health(), lambda _: None)
    for i in range(100):
        fleet.add(Replica(f"r{i}", "http://127.0.0.1:9"))
    watch = Watch(fleet, Health(), Scrape(), random.Random(0))
    watch.sync()

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    try:
        await until(lambda: len(made) == 100)
    finally:
        counting.cancel()
        await watch.close()
    assert made == [f"r{i}" for i in range(100)]
    assert len(set(in_turn[:AT_ONCE])) == 1
    assert len(set(in_turn[AT_ONCE:])) == 100 - AT_ONCE, "each in a turn of its own"


async def test_requests_of_the_control_plane_that_come_together_are_begun_one_a_turn() -> None:
    async with running() as g:
        begun: list[int] = []
        turns = 0

        async def admin(scope: Any, receive: Any, send: Any) -> None:
            begun.append(turns)

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        g.gateway.admin = admin  # type: ignore[assignment]
        counting = asyncio.create_task(count())
        scope = {"type": "http", "path": "/admin/live"}
        try:
            await asyncio.gather(*(g.gateway(scope, None, None) for _ in range(50)))  # type: ignore[arg-type]
        finally:
            counting.cancel()
        assert len(begun) == 50
        assert len(set(begun)) == 50
