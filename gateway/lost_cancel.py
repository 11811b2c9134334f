"""Whether a task was told to end, for loops that have no end of their own.

A cancellation is an exception that is thrown once, and it can get lost: `asyncio.wait_for` before Python 3.12 drops it
when what it waits for comes in the same turn of the loop, and a client that cleans up after it may raise another error
instead. A loop that goes on all the same would keep a process from ever ending. So such loops ask here each time.
"""

from __future__ import annotations

import asyncio


def told_to_end() -> bool:
    """Of the task that asks; False outside of one."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
