"""An upper bound on good requests that no policy can pass: a linear programme over what any on-time set must obey.

Everything is relaxed in the policy's favour: one pooled, preemptive server of all replicas' time, an infinite cache of
every prefix that any earlier arrival contained, lengths known, nobody disturbed by a neighbour's prefill. A step of at
most B tokens takes at least a + b x tokens + overhead, so a token costs at least b + (a + overhead) / B seconds. For
every interval [s, t]: prefill seconds of the chosen with arrival >= s and first-token deadline <= t, and all
seconds of those whose latest on-time end is <= t, fit into replicas x (t - s); KV seconds likewise. Maximise the sum
of 0 <= x_j <= 1 under a sample of intervals: leaving some out only loosens it, so any sample is valid.
Cross-check: with all releases at the first arrival the count is solved exactly by Moore (1968), also an upper bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtests.scenario import Scenario
from loadtests.schedule import Row, Schedule

SAMPLE = 32  # starts and ends each


@dataclass(slots=True, frozen=True)
class Work:
    """Least effort of one request, in seconds of one replica, and when it can be done."""

    release_s: float
    first_due_s: float
    end_due_s: float
    prefill_s: float
    total_s: float
    kv_token_s: float


@dataclass(slots=True, frozen=True)
class Bound:
    good: float  # no policy has more good requests in the cohort
    moore_hodgson: int
    intervals: int

    def looseness(self, achieved: float) -> float | None:
        """Bound over the best that was achieved; 1 would be tight. None when nothing was."""
        return self.good / achieved if achieved > 0 else None


def upper_bound(schedule: Schedule, scenario: Scenario) -> Bound:
    """Needs scipy. The bound is over the cohort; rows that do not count are left out in the policy's favour."""
    works = least_work(schedule, scenario)
    if not works:
        return Bound(0.0, 0, 0)
    replicas = float(len(scenario.engines))
    capacity = float(sum(_blocks(e) for e in scenario.engines))
    good, intervals = _solve(works, replicas, capacity)
    count = moore_hodgson([(w.first_due_s, w.prefill_s / replicas) for w in works], min(w.release_s for w in works))
    return Bound(min(good, float(count)), count, intervals)


def least_work(schedule: Schedule, scenario: Scenario) -> list[Work]:
    """One entry per cohort row, from the fastest replica of the scenario."""
    profiles = [e.profile for e in scenario.engines]
    budgets = [e.max_num_batched_tokens or e.profile.max_num_batched_tokens for e in scenario.engines]
    token_s = min(
        p.per_token_s + (p.base_s + p.overhead_s) / budget for p, budget in zip(profiles, budgets, strict=True)
    )
    context_s = min(p.per_context_token_s for p in profiles)
    chunk_s = min(p.per_chunk_context_s for p in profiles)
    floor_s = min(p.floor_s + p.overhead_s for p in profiles)
    counted = {row.id for row in schedule.cohort}
    seen: set[tuple[str | None, int]] = set()
    end = schedule.window_s + schedule.drain_s
    works = []
    for row, release in _in_order(schedule):
        hit = next((i for i, b in enumerate(row.blocks) if (row.adapter, b) not in seen), len(row.blocks))
        seen.update((row.adapter, block) for block in row.blocks)
        if row.session is not None and row.at_s is None:
            hit = len(row.blocks)  # the answer before it may have been cached too
        if row.id not in counted or release >= end:
            continue  # a turn that cannot come before the end of the run is good under nobody
        cached = min(hit * schedule.block_tokens, row.prompt_tokens - 1)
        new = row.prompt_tokens - cached
        bounds = schedule.objectives(row)
        prefill = new * token_s + chunk_s * new * (cached + new / 2)
        steps = row.output_tokens - 1
        total = prefill + steps * (token_s + context_s * row.prompt_tokens)
        fixed = row.at_s is not None
        first = release + bounds.ttft_s if fixed and bounds.ttft_s is not None else end
        last = end
        if fixed and bounds.ttft_s is not None and bounds.tpot_s is not None:
            last = first + steps * bounds.tpot_s
        if fixed and bounds.e2e_s is not None:
            last = min(last, release + bounds.e2e_s)
        held = (new + row.output_tokens / 2) * steps * floor_s
        works.append(Work(release, min(first, last, end), min(last, end), prefill, total, held))
    return works


def moore_hodgson(jobs: Sequence[tuple[float, float]], start_s: float) -> int:
    """Most jobs on time on one machine when all are there at `start_s`; jobs are (deadline, seconds). Moore 1968."""
    done, longest = start_s, list[float]()
    for due, seconds in sorted(jobs):
        heapq.heappush(longest, -seconds)
        done += seconds
        if done > due:
            done += heapq.heappop(longest)
    return len(longest)


def _solve(works: Sequence[Work], replicas: float, capacity_tokens: float) -> tuple[float, int]:
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    release = np.array([w.release_s for w in works])
    first, last = np.array([w.first_due_s for w in works]), np.array([w.end_due_s for w in works])
    prefill, total = np.array([w.prefill_s for w in works]), np.array([w.total_s for w in works])
    held = np.array([w.kv_token_s for w in works])
    rows: list[Any] = []
    limits: list[float] = []
    for start in _sample(release):
        late = release >= start
        for due, seconds in ((first, prefill), (last, total)):
            for stop in _sample(due[late]) if late.any() else ():
                if stop <= start:
                    continue
                rows.append(np.where(late & (due <= stop), seconds, 0.0))
                limits.append(replicas * (stop - start))
        stop = float(last.max())
        if stop > start:
            rows.append(np.where(late, held, 0.0))
            limits.append(capacity_tokens * (stop - start))
    matrix: Any = csr_array(np.array(rows))  # the stubs know dense ones only
    found: Any = linprog(-np.ones(len(works)), A_ub=matrix, b_ub=np.array(limits), bounds=(0.0, 1.0), method="highs")
    if not found.success:
        raise RuntimeError(f"the bound's linear programme was not solved: {found.message}")
    return float(-found.fun), len(limits)


def _sample(values: Any) -> list[float]:
    """At most SAMPLE values, evenly spread over their order, the extremes included."""
    ordered = sorted({float(v) for v in values})
    if len(ordered) <= SAMPLE:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (SAMPLE - 1))] for i in range(SAMPLE)]


def _in_order(schedule: Schedule) -> list[tuple[Row, float]]:
    """Rows with their earliest possible time: a later turn comes at least all think times after its session's start."""
    out: list[tuple[Row, float]] = []
    thought: dict[str, float] = {}
    for row in schedule.rows:
        start = schedule.start_s(row)
        if row.at_s is None and row.session is not None:
            thought[row.session] = thought.get(row.session, 0.0) + row.think_s
            start += thought[row.session]
        out.append((row, start))
    return sorted(out, key=lambda pair: (pair[1], pair[0].id))


def _blocks(config: Any) -> int:
    return int((config.num_blocks or config.profile.num_blocks) - 1) * int(
        config.block_size or config.profile.block_size
    )
