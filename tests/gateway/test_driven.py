"""The same coroutine under callbacks and under a task."""

from __future__ import annotations

import asyncio

import pytest

from gateway.driven import Driven

pytestmark = pytest.mark.plain


class Story(Driven):
    def __init__(self, pauses: int) -> None:
        self.pauses = pauses
        self.told: list[str] = []

    async def run(self) -> None:
        self.told.append("begun")
        for at in range(self.pauses):
            await self.pause()
            self.told.append(f"woken {at}")
        self.told.append("ended")


async def test_it_runs_to_its_first_pause_and_on_inside_the_callers() -> None:
    story = Story(2)
    story.drive(story.run())
    assert story.told == ["begun"]
    story.wake(at_once=True)
    assert story.told == ["begun", "woken 0"]
    story.wake(at_once=True)
    assert story.told == ["begun", "woken 0", "woken 1", "ended"]
    story.wake(at_once=True)  # too late: nothing happens
    story.wake()


async def test_a_wake_in_the_next_turn_counts_once() -> None:
    story = Story(2)
    story.drive(story.run())
    story.wake()
    story.wake()
    story.wake(at_once=True)
    assert story.told == ["begun"]
    await asyncio.sleep(0)
    assert story.told == ["begun", "woken 0"]


async def test_what_is_ready_begins_with_the_next_wake() -> None:
    story = Story(1)
    story.ready(story.run())
    assert story.told == []
    story.wake(at_once=True)
    assert story.told == ["begun"]


async def test_under_a_task_it_waits_as_usual() -> None:
    story = Story(1)
    task = asyncio.create_task(story.run())
    await asyncio.sleep(0)
    story.wake(at_once=True)
    assert story.told == ["begun"]
    await task
    assert story.told == ["begun", "woken 0", "ended"]


async def test_a_failure_in_the_last_step_is_logged_and_goes_no_further(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Driven):
        async def run(self) -> None:
            raise ValueError("no")

    broken = Broken()
    broken.drive(broken.run())
    assert "a request failed in its last step" in caplog.text
