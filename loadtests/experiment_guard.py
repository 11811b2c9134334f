"""Do guard rails stop what they should, and only that? Whole runs of the queue model, judged each second as live.

Bad: half of the sessions get a policy that sends everything to one replica. Good: they get the better policy, or the
same one. Every request is counted and judged by the code of `policies/guard.py`, by buckets of sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from loadtests.experiment_model import AFFINITY, PILE, SPREAD, World, good, run, traffic
from policies.clusters import Clusters
from policies.guard import Rails, breach

SEED = 20_260_102
BUSY = replace(World(), rate_rps=20.0, replicas=16, sessions=400)  # the world of the other check, four times as wide
KINDS = {
    "bad: all to one replica": (SPREAD, PILE),
    "good: better": (SPREAD, AFFINITY),
    "good: the same": (SPREAD, SPREAD),
}


@dataclass(slots=True)
class Stops:
    kind: str
    runs: int
    at_s: list[float]  # of the runs that were stopped

    @property
    def within_60(self) -> int:
        return sum(at <= 60.0 for at in self.at_s)


def stops(
    kind: str, runs: int, seconds: float, world: World = BUSY, every_s: float = 1.0,
    progress: Callable[[float], None] = lambda share: None,
) -> Stops:  # fmt: skip
    """When each of `runs` repetitions was stopped, if it was."""
    control, arm = KINDS[kind]
    rng = np.random.default_rng([SEED, list(KINDS).index(kind)])
    load = traffic(world, seconds, runs, rng)
    arms = (load.drawn >= 0.5).astype(np.int8)
    ttft, _ = run(world, load, np.where(arms == 1, arm, control).astype(np.int8))
    met = good(world, load, ttft)
    stopped = []
    for r in range(runs):
        ends = load.at[:, r] + ttft[:, r]  # a request is judged when its first token shows it good or late
        order = np.argsort(ends)
        counts, due = Clusters(), every_s
        for k in order:
            end = float(ends[k])
            if end > seconds:
                break
            found = None
            while end > due and found is None:
                found = breach(Rails(), 2, 1, counts)
                if found is not None:
                    stopped.append(due)
                due += every_s
            if found is not None:
                break
            counts.add((int(arms[k, r]), 0), int(load.bucket[k, r]), bool(met[k, r]), False, None, 0.0)
        progress((r + 1) / runs)
    return Stops(kind, runs, stopped)
