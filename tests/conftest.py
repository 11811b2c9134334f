"""For every test: hypothesis without deadlines, and no process left when the session ends, also by SIGTERM.

A machine may be busy, so no example has a deadline, and drawing one may take as long as it likes. In CI the examples
are the same each time and no database is kept; elsewhere they are drawn anew, so that many runs search wider than one.
What a session starts inherits a mark in its environment, also what left for a session of its own; whatever carries it
at the end was left behind.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

OURS = os.getpid()
MARK = f"FOREBAY_TEST_SESSION={OURS}"
os.environ.update([MARK.split("=")])
GONE_WITHIN_S = 120.0
ENDS_WITH_US = b"multiprocessing.resource_tracker"


def _ended(number: int, frame: object) -> None:
    """As Ctrl-C: fixtures still stop what they started. A child that was forked ends as if it had no such rule."""
    if os.getpid() == OURS:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


signal.signal(signal.SIGTERM, _ended)
BUSY: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # both are of the clock
settings.register_profile("forebay", print_blob=True, **BUSY)
settings.register_profile("ci", derandomize=True, database=None, print_blob=True, **BUSY)
settings.load_profile("ci" if os.environ.get("CI") else "forebay")


def left_behind() -> list[str]:
    """Command lines of processes that this session started, zombies apart."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marks, line = (folder / "environ").read_bytes().split(b"\0"), (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it ended, or is another user's
        if MARK.encode() in marks and int(folder.name) != os.getpid() and ENDS_WITH_US not in line:
            found.append(f"{folder.name}: {line.replace(bytes(1), b' ').decode(errors='replace')}")
    return found


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    yield
    end = time.monotonic() + GONE_WITHIN_S
    while (left := left_behind()) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == [], "processes that tests left behind"
