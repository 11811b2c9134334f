"""What the log is told about Redis: each change, and no more lines than somebody reads."""

from __future__ import annotations

import logging

import pytest

from gateway.shared.store import Changes

AWAY = "ConnectionError; going on with what this gateway knows alone"
FULL = "refuses commands (OutOfMemoryError); it is read as before"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [f"{record.levelname} {record.message}" for record in caplog.records]
    caplog.clear()
    return lines


def test_each_change_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    changes = Changes("10.0.0.5:6379", clock)
    for trouble in ("", "", AWAY, AWAY, AWAY, FULL, FULL, ""):
        clock.now += 0.1
        changes.seen(trouble)
    assert told(caplog) == [
        "INFO redis 10.0.0.5:6379: answers",
        f"WARNING redis 10.0.0.5:6379: {AWAY}",
        f"WARNING redis 10.0.0.5:6379: {FULL}",
        "INFO redis 10.0.0.5:6379: answers",
    ]


def test_one_that_comes_and_goes_is_told_of_six_times_a_minute_and_as_it_is_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    changes = Changes("10.0.0.5:6379", clock)
    for i in range(101):
        clock.now += 0.1
        changes.seen(AWAY if i % 2 else "")
    assert len(told(caplog)) == 6
    clock.now += 60.0
    changes.seen("")
    changes.seen("")
    assert told(caplog) == ["INFO redis 10.0.0.5:6379: answers (94 changes before that are not told)"]
