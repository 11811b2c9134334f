"""Do guard rails stop what they should, and only that? Whole runs of the queue model, judged each second as live.

Bad: the arm is a policy that sends everything to one replica. Good: it is the better policy, or the same one. Requests
are assigned by `Assigner` and judged by `policies/guard.py`, as in the gateway, in each design as it comes: default
slices, an experiment that starts anywhere within them. A request is counted as live: late as soon as its first token is
overdue, good at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from loadtests.experiment_model import AFFINITY, PILE, SPREAD, Traffic, World, good, run, traffic
from policies.clusters import GOOD, REQUESTS, Clusters
from policies.designs import Assigner, Assignment, Design, Plan
from policies.guard import Rails, Recent, breach, share, unit, window

SEED = 20_260_102
BUSY = replace(World(), rate_rps=20.0, replicas=16, sessions=400)  # the world of the other check, four times as wide
KINDS = {
    "bad: all to one replica": (SPREAD, PILE),
    "good: better": (SPREAD, AFFINITY),
    "good: the same": (SPREAD, SPREAD),
}
BOUND = Rails().attainment_drop or 0.0
ANSWER_S = 2.0  # from the first token to the end
BEGAN_UNIX = 1_800_000_000.0
_SPLIT = Plan("guard", Design.SPLIT, ("control", "arm"), (1.0, 1.0), 0, 0.0, probation_s=120.0)
PLANS = {
    "split": _SPLIT,
    "split, swing 0": replace(_SPLIT, swing=0.0),
    "partition": replace(_SPLIT, design=Design.PARTITION),
    "switchback": replace(_SPLIT, design=Design.SWITCHBACK),
}


@dataclass(slots=True)
class Stops:
    kind: str
    design: str
    runs: int
    at_s: list[float]  # of the runs that were stopped

    @property
    def within_60(self) -> int:
        return sum(at <= 60.0 for at in self.at_s)


def stops(
    kind: str, runs: int, seconds: float, world: World = BUSY, every_s: float = 1.0,
    progress: Callable[[float], None] = lambda share: None, design: str = "split",
) -> Stops:  # fmt: skip
    """When each of `runs` repetitions was stopped, if it was."""
    policies = KINDS[kind]
    rng = np.random.default_rng([SEED, list(KINDS).index(kind)])
    load = traffic(world, seconds, runs, rng)
    plans = _plans(PLANS[design], runs)
    given = [_given(plan, load, r) for r, plan in enumerate(plans)]
    n = load.at.shape[0]
    policy = np.array([[policies[one.arm] for one in column] for column in given], np.int8).T
    groups: NDArray[np.int8] | None = None
    if PLANS[design].design is Design.PARTITION:
        groups = np.array([[one.group for one in column] for column in given], np.int8).T
    ttft, _ = run(world, load, policy, groups, 1 if groups is None else 2)
    met = good(world, load, ttft)
    stopped = []
    for r, plan in enumerate(plans):
        due_s = world.objective_s + world.objective_per_token * load.prompt[:, r]
        ends = load.at[:, r] + np.where(met[:, r], ttft[:, r] + ANSWER_S, due_s)
        counts, recent, due = Clusters(), Recent(), every_s
        seen, was_good = [0, 0], [0, 0]
        for k in np.argsort(ends)[:n].tolist():
            end = float(ends[k])
            if end > seconds:
                break
            found = None
            while end > due and found is None:
                # an estimate that is not beyond the bound has no interval that is: not worth computing
                if was_good[1] * seen[0] < (was_good[0] - BOUND * seen[0]) * seen[1]:
                    found = breach(Rails(), 2, 1, counts)
                now = window(plan, plan.started_unix + due)
                if found is None and now == recent.window and _below(recent.sums):
                    found = breach(Rails(), 2, 1, recent.sums, share(plan, now))
                if found is not None:
                    stopped.append(due)
                due += every_s
            if found is not None:
                break
            one, is_good = given[r][k], bool(met[k, r])
            came = plan.started_unix + float(load.at[k, r])
            at = unit(plan.design, one, came)
            counts.add((one.arm, 0), at, is_good, False, None, 0.0)
            recent.add(window(plan, came), (one.arm, 0), at, is_good, False, None, 0.0)
            seen[one.arm] += 1
            was_good[one.arm] += is_good
        progress((r + 1) / runs)
    return Stops(kind, design, runs, stopped)


def _below(sums: Clusters) -> bool:
    seen, was_good = ([sums.total(arm, column) for arm in (0, 1)] for column in (REQUESTS, GOOD))
    return was_good[1] * seen[0] < (was_good[0] - BOUND * seen[0]) * seen[1]


def _plans(plan: Plan, runs: int) -> list[Plan]:
    """Begun at instants drawn from an hour, each with a seed of its own."""
    rng = np.random.default_rng(SEED)
    return [replace(plan, seed=r, started_unix=BEGAN_UNIX + float(rng.uniform(0.0, 3600.0))) for r in range(runs)]


def _given(plan: Plan, load: Traffic, r: int) -> list[Assignment]:
    assigner = Assigner(plan)
    ats = np.where(np.isfinite(load.at[:, r]), load.at[:, r], 1e6)
    return [
        assigner.assign(f"{key:.9f}", plan.started_unix + at)
        for key, at in zip(load.drawn[:, r].tolist(), ats.tolist(), strict=True)
    ]
