"""What the benchmark of a gateway's memory calls growth."""

from __future__ import annotations

from pathlib import Path

from loadtests.bench.memory import LOOKS, Memory
from loadtests.bench.processes import Server

MIB = 2**20


def looked(core: list[int], failed: int = 0) -> Memory:
    looks = [{"forebay-core (7)": size * MIB, "forebay-hand-0 (8)": 42 * MIB} for size in core]
    return Memory([1000 * (n + 1) for n in range(len(core))], looks, failed)


FULL = looked([90, 135, 170, 200, 210, 213, 222, 220, 224, 228, 226, 219])
LEAK = looked([90 + 10 * n for n in range(LOOKS)])


def test_what_fills_up_and_then_stands_holds() -> None:
    assert FULL.growth == {"forebay-core (7)": 228 / 222, "forebay-hand-0 (8)": 1.0}
    assert FULL.holds


def test_what_goes_on_growing_does_not() -> None:
    assert LEAK.growth["forebay-core (7)"] == 200 / 160
    assert not looked([200] * 8 + [200, 212, 200, 200]).holds
    assert not LEAK.holds


def test_a_process_that_was_replaced_or_a_request_that_failed_says_nothing_about_memory() -> None:
    assert not looked([200] * LOOKS, failed=1).holds
    again = looked([200] * LOOKS)
    again.looks[-1] = {"forebay-core (9)": 50 * MIB}
    assert not again.holds


def test_memory_is_told_by_process(tmp_path: Path) -> None:
    server = Server(["sleep", "600"], tmp_path / "log")
    try:
        (only,) = server.private_bytes().items()
    finally:
        server.stop()
    assert only[0].endswith(f"({server.process.pid})")
    assert 0 < only[1] < 100 * MIB
