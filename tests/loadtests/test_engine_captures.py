"""The engine model against recordings of real vLLM 0.32: preemption by the second, eviction block by block."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from loadtests.engine import Engine, EngineConfig, Job
from loadtests.profiles import Profile

CAPTURES = Path(__file__).resolve().parent.parent / "captures"

# of the recorded machine, fitted to the recording: 15.4 ms a decode step of up to 8, 22.8 ms a prefill of 128 tokens
RECORDED = Profile("recorded", 0.0154, 0.010, 0.0001, 0.0, 0.0, num_blocks=96, block_size=32, max_num_seqs=8)
SECOND = re.compile(
    r"\s*([\d.]+)s num_requests_running\{\} ([\d.]+) num_requests_waiting\{\} ([\d.]+).* "
    r"kv_cache_usage_perc\{\} ([\d.]+) num_preemptions_total\{\} ([\d.]+)"
)


def recorded_seconds() -> list[tuple[float, ...]]:
    found = [SECOND.match(line) for line in (CAPTURES / "preemption.txt").read_text().splitlines()]
    return [tuple(float(x) for x in match.groups()) for match in found if match]


def replay_preemption() -> tuple[Engine, list[Job], list[tuple[float, ...]]]:
    """Twelve equal prompts of 128 tokens and equal answers of 600, on a cache of 95 blocks."""
    engine = Engine(EngineConfig(RECORDED))
    jobs = [Job(f"r{i}", 128, 600, list(range(23))) for i in range(12)]
    for job in jobs[:2]:  # the recording's first step holds two: 0.161 s to their first token, 0.2 s to the others'
        engine.add(job, 0.030)
    step = engine.step(0.030)
    for job in jobs[2:]:
        engine.add(job, 0.035)
    seconds, seen = [row[0] for row in recorded_seconds()], []
    while step is not None:
        while len(seen) < len(seconds) and seconds[len(seen)] < step.end:
            gauges = engine.gauges(seconds[len(seen)])
            seen.append((gauges.running, gauges.waiting, gauges.kv_usage, engine.counters.preemptions))
        step = engine.step(step.end)
    return engine, jobs, seen


def test_preemption_is_reproduced_second_by_second() -> None:
    engine, jobs, seen = replay_preemption()
    rows = recorded_seconds()
    assert len(rows) == len(seen) == 19
    for (second, running, waiting, usage, preemptions), (our_running, our_waiting, our_usage, ours) in zip(
        rows, seen, strict=True
    ):
        assert our_usage == pytest.approx(usage, abs=0.05), second
        assert (our_running, our_waiting) == (running, waiting), second
        assert ours == pytest.approx(preemptions, rel=0.2, abs=1), second
    assert engine.counters.preemptions == pytest.approx(18, rel=0.2)
    assert (engine.counters.prefix_queries, engine.counters.prefix_hits) == (1536, 1056)
    assert (engine.counters.prompt_tokens, engine.counters.generation_tokens) == (1536, 7200)
    assert [job.outputs for job in jobs] == [600] * 12


def test_the_last_four_wait_for_the_first_answers_to_end() -> None:
    _, jobs, _ = replay_preemption()
    ttft_s = [(job.first_token_at or 0.0) - job.arrived_at for job in jobs]
    assert max(ttft_s[:8]) < 0.3
    assert ttft_s[8:] == pytest.approx([9.453, 9.454, 9.467, 9.468], rel=0.03)
    assert [job.finished_at for job in jobs[8:]] == pytest.approx([18.8] * 4, rel=0.03)


# -- eviction -----------------------------------------------------------------------------------------------------

ROW = re.compile(r"(.+?) \| REMOVE x(\d+): ([^|]*?)(?: \| STORE (\[.*\]))?$")


def recorded_events() -> dict[str, tuple[list[str], list[str]]]:
    """Name of a prompt -> (blocks removed in event order, blocks stored)."""
    events = {}
    for line in (CAPTURES / "lru-eviction.txt").read_text().splitlines():
        if match := ROW.match(line):
            name, number, removed, stored = match.groups()
            items = re.findall(r"\?|[\w+ ]+?#\d+", removed)
            assert len(items) == int(number)
            events[name] = ([i.strip() for i in items], ast.literal_eval(stored) if stored else [])
    return events


PROMPTS: dict[str, tuple[int, int, int, int, int]] = {
    # name of the row -> first id, blocks, tokens beyond them, output tokens, cached tokens in the recording
    "A": (300, 20, 0, 2, 0),
    "B": (400, 20, 0, 2, 0),
    "touch A0-4": (300, 5, 1, 2, 160),
    "C fills": (500, 58, 0, 2, 32),
    "D evicts": (600, 10, 0, 2, 0),
    "E evicts": (700, 10, 0, 2, 0),
    "A again": (300, 20, 0, 2, 160),
    "X": (800, 4, 0, 1, 0),
    "X warm": (800, 4, 0, 1, 96),
    "X+1": (800, 4, 1, 1, 128),
}
OWNER = {300: "A", 400: "B", 500: "C fills", 600: "D evicts", 700: "E evicts", 800: "X"}


def test_eviction_order_is_reproduced_exactly() -> None:
    engine = Engine(EngineConfig(RECORDED, enable_prefix_caching=True))
    # what stood there before the recording: the block that C hits, last, and 90 unknown ones; 4 blocks were never used
    engine.add(Job("before", 91 * 32, 1, [500, *range(1000, 1090)]), 0.0)
    now = 0.0
    while (step := engine.step(now)) is not None:
        now = step.end
    events = recorded_events()
    assert set(PROMPTS) - {"touch A0-4"} == set(events)
    for name, (first, blocks, more, outputs, cached) in PROMPTS.items():
        removed: list[tuple[int | None, int]] = []
        engine.pool.evictions = removed
        chain = [first + i for i in range(blocks)] + [9000 + len(name)] * bool(more)
        engine.add(job := Job(name, blocks * 32 + more, outputs, chain), now)
        while (step := engine.step(now)) is not None:
            now = step.end
        assert job.cached_tokens == cached, name
        names = ["?" if key is None or key >= 1000 else f"{OWNER[key // 100 * 100]}#{key}" for key, _ in removed]
        assert names == (events[name][0] if name in events else []), name
