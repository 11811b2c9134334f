"""Waiting for others, without counting the time in which the gateway itself stood still."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway import patience
from gateway.patience import Patience


async def test_what_came_while_the_loop_stood_still_was_in_time() -> None:
    said = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stand_still() -> None:
        time.sleep(0.6)
        loop.call_later(0.05, said.set)

    loop.call_soon(stand_still)
    async with Patience(0.2):
        await said.wait()


async def test_who_never_answers_is_given_up_however_often_the_loop_is_late() -> None:
    loop = asyncio.get_running_loop()
    stood: list[asyncio.Handle] = []

    def stand_still() -> None:
        time.sleep(0.05)
        stood.append(loop.call_soon(stand_still))

    stand_still()
    try:
        with pytest.raises(TimeoutError):
            async with Patience(0.01):
                await asyncio.Event().wait()
    finally:
        stood[-1].cancel()
    assert len(stood) > patience.MOST_GIVEN_BACK


async def test_without_a_bound_it_waits_and_a_cancellation_stays_one() -> None:
    async def waits() -> None:
        async with Patience(None):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(waits())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
