"""A loop without an end ends when it is told to, also where the telling was lost on its way."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import gateway
from gateway.lost_cancel import told_to_end


async def deaf(until: asyncio.Event) -> int:
    """Waits in a way that loses a cancellation, like a library that cleans up after it."""
    turns = 0
    while not told_to_end():
        turns += 1
        try:
            await until.wait()
        except asyncio.CancelledError:
            continue
    return turns


async def test_a_loop_whose_library_lost_the_cancellation_ends_with_its_turn() -> None:
    task = asyncio.create_task(deaf(asyncio.Event()))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == 1


async def test_a_time_limit_that_passes_does_not_tell_a_loop_to_end() -> None:
    try:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
    except TimeoutError:
        assert not told_to_end()


def test_no_loop_that_waits_is_endless_but_those_of_one_request() -> None:
    """And `asyncio.wait_for`, which loses cancellations before Python 3.12, is used nowhere."""
    endless = set()
    for path in Path(gateway.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert "wait_for" not in {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}, path
        for made in [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)]:
            loops = [node for node in ast.walk(made) if isinstance(node, ast.While)]
            if any(isinstance(loop.test, ast.Constant) for loop in loops):
                endless.add((path.name, made.name))
    assert endless == {
        ("waits.py", "_serve"),
        ("waits.py", "_attempt"),
        ("client.py", "read_body"),
        ("client.py", "_pump"),
    }
