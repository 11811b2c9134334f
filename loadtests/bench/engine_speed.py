"""How fast the engine model runs, without a gateway: `python -m loadtests.bench.engine_speed [--profile]`.

Poisson arrivals dealt round robin over replicas, prompts as long as those of a chat trace (lognormal, mean 12k
tokens, ids of 512 tokens, a third of them shared), answers of 350. Prints virtual against CPU seconds, once with
many steps at once and once step by step; the two must give the same counts.
"""

from __future__ import annotations

import argparse
import cProfile
import heapq
import pstats
import random
import time
from math import inf

from loadtests.engine import Engine, EngineConfig, Job, Step

UNIT_TOKENS = 512


def arrivals(rate: float, window_s: float, seed: int) -> list[tuple[float, Job]]:
    rng, at, fresh = random.Random(seed), 0.0, 1_000_000
    rows: list[tuple[float, Job]] = []
    while (at := at + rng.expovariate(rate)) < window_s:
        prompt = min(120_000, int(rng.lognormvariate(8.9, 1.0)) + 1)
        units = -(-prompt // UNIT_TOKENS)
        shared = units // 3 if rng.random() < 0.5 else 1
        family = rng.randrange(500) * 1000
        chain = [family + u for u in range(shared)] + list(range(fresh, fresh + units - shared))
        fresh += units
        rows.append((at, Job(str(len(rows)), prompt, 1 + int(rng.expovariate(1 / 350)), chain)))
    return rows


def run(replicas: int, rate: float, window_s: float, until: float | None) -> tuple[float, int, int, int]:
    """CPU seconds, calls of step, engine steps, finished requests."""
    engines = [Engine(EngineConfig(unit_tokens=UNIT_TOKENS)) for _ in range(replicas)]
    rows = arrivals(rate, window_s, 1)
    events: list[tuple[float, int, Engine, Job | Step]] = [
        (at, i, engines[i % replicas], job) for i, (at, job) in enumerate(rows)
    ]
    serial, calls, start = len(rows), 0, time.process_time()
    while events:
        now, _, engine, what = heapq.heappop(events)
        if isinstance(what, Job):
            before = engine.current.end if engine.current else 0.0
            engine.add(what, now)
            step = engine.current if engine.current else engine.step(now, until)
            if step is not None and step.end == before:
                continue
        elif engine.current is not what or what.end != now:
            continue
        else:
            calls += 1
            step = engine.step(now, until)
        if step is not None:
            serial += 1
            heapq.heappush(events, (step.end, serial, engine, step))
    cpu_s = time.process_time() - start
    counters = [engine.counters for engine in engines]
    return cpu_s, calls, sum(c.steps for c in counters), sum(c.finished for c in counters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    asked = parser.parse_args()
    for replicas, rate, window_s in ((8, 3.3, 600.0), (64, 26.0, 300.0)):
        for name, until in (("many steps at once", inf), ("step by step", None)):
            cpu_s, calls, steps, finished = run(replicas, rate, window_s, until)
            print(
                f"{replicas} replicas, {rate} requests/s, {window_s:.0f} s, {name}: {cpu_s:.2f} s of CPU, "
                f"{calls} calls, {steps} engine steps, {finished} requests, {cpu_s / calls * 1e6:.1f} us a call"
            )
    if asked.profile:
        profiler = cProfile.Profile()
        profiler.runcall(run, 64, 26.0, 300.0, inf)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(12)


if __name__ == "__main__":
    main()
