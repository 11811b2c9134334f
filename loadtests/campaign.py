"""Many virtual runs: every arm on the same schedules, over loads and seeds, on all cores.

A run is named by (arm, load, seed); its schedule by (load, seed), so arms are paired by construction. Workers get the
source by fork and send back one summary entry and the lines of requests.jsonl. The order in which runs end does not
show anywhere: results are sorted as they were asked for.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from loadtests import live_result, results
from loadtests.gaps import group_gaps
from loadtests.gateways import RequestMaker, balancers
from loadtests.hands import Handed
from loadtests.offer import Offer
from loadtests.oracle import Truth, best_run
from loadtests.profiles import Profile
from loadtests.record import ERRORS
from loadtests.reuse import ceiling
from loadtests.scenario import Incident, Scenario, engine
from loadtests.schedule import Schedule
from loadtests.virtual import Outcomes, Simulation
from policies import make
from policies.arms import Arm

ORACLE = "oracle"


@dataclass(frozen=True)
class Fleet:
    """What the command line says about replicas and gateways; becomes a Scenario with the schedule's block size."""

    profiles: tuple[Profile, ...]  # one per replica
    budget: int | None = None
    gateways: int = 1
    scrape_age_s: float = 0.0
    peers: bool = False
    shared_index: bool = False
    patience: bool = False
    hands: int = 0
    incidents: tuple[Incident, ...] = ()

    def describe(self) -> dict[str, Any]:
        """What has to be equal for two runs to be compared."""
        return {
            "profiles": [p.name for p in self.profiles],
            "max_num_batched_tokens": self.budget,
            "gateways": self.gateways,
            "scrape_age_s": self.scrape_age_s,
            "peers": self.peers,
            "shared_index": self.shared_index,
            "patience": self.patience,
            "hands": self.hands,
            "incidents": [asdict(i) for i in self.incidents],
        }

    def scenario(self, schedule: Schedule) -> Scenario:
        return Scenario(
            tuple(engine(p, self.budget, schedule.block_tokens) for p in self.profiles),
            gateways=self.gateways,
            scrape_age_s=self.scrape_age_s,
            peers=self.peers,
            shared_index=self.shared_index,
            patience=self.patience,
            hands=self.hands,
            incidents=self.incidents,
        )


@dataclass(frozen=True)
class Task:
    arm: str
    load: float
    seed: int


@dataclass(frozen=True)
class Campaign:
    """Everything a worker needs; `arms` by their text."""

    offer: Offer
    fleet: Fleet
    arms: Mapping[str, Arm]
    policy_settings: Mapping[str, Mapping[str, Any]]  # of a policy, by its name
    oracle: Arm | None = None
    cache: Path | None = None  # of oracle results
    truth: Truth = field(default_factory=Truth)

    def tasks(self, loads: Sequence[float], seeds: Sequence[int]) -> list[Task]:
        names = [*self.arms, *([ORACLE] if self.oracle else [])]
        return [Task(name, load, seed) for load in loads for name in names for seed in seeds]

    def check(self, loads: Sequence[float]) -> None:
        """Raises ScheduleError when the source is too short for the largest load."""
        self.offer.source.check(max(loads), self.offer.window_s, self.offer.drain_s)

    def run(self, task: Task, schedule: Schedule) -> tuple[dict[str, Any], bytes]:
        if task.arm == ORACLE:
            assert self.oracle is not None
            outcomes, pace = best_run(
                schedule, self.fleet.scenario(schedule), self.oracle, self.policy_settings, self.truth, self.cache
            )
            entry = summarise(schedule, outcomes, task.arm, self.oracle, self.fleet.describe())
            entry["pace"] = pace
        else:
            arm = self.arms[task.arm]
            outcomes = simulate_arm(schedule, self.fleet.scenario(schedule), arm, self.policy_settings)
            entry = summarise(schedule, outcomes, task.arm, arm, self.fleet.describe())
        rows = b"".join(results.line(r, task.arm, task.load, task.seed) for r in outcomes.records)
        return entry, rows


def simulate_arm(
    schedule: Schedule, scenario: Scenario, arm: Arm, policy_settings: Mapping[str, Mapping[str, Any]]
) -> Outcomes:
    """One run of one arm. Raises ConservationError when its books do not balance."""

    def policy(rng: random.Random) -> Any:
        return make(arm.policy, policy_settings.get(arm.policy), rng)

    cores = balancers(policy, schedule.classes, arm.settings, scenario.gateways, schedule.recipe.seed)
    kind = Handed if scenario.hands else Simulation
    return kind(schedule, scenario, cores, schedule.recipe.seed).run()


def summarise(schedule: Schedule, outcomes: Outcomes, name: str, arm: Arm, setup: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of one virtual run: what every run has, and what only a simulator sees."""
    entry = results.summarise(schedule, outcomes.records, name, size_fairness=arm.settings.size_fairness)
    cohort = results.cohort_of(schedule, outcomes.records)
    served = {r.id: r for r in outcomes.records if r.cached_tokens is not None}
    rows, replicas = [row for row in schedule.rows if row.id in served], len(setup["profiles"])
    prompt = sum(row.prompt_tokens for row in rows)
    held = RequestMaker(schedule).held_after
    entry |= {
        "view": "virtual time",
        "error_rate": sum(r.partition in ERRORS for r in cohort) / len(cohort) if cohort else None,
        "reasons_by_outcome": live_result.reasons_by_outcome(cohort),
        "attempts": live_result.attempts(cohort),
        "reuse": {
            # of all rows that were served, counted or not: the same population on both sides
            "achieved": sum(r.cached_tokens or 0 for r in served.values()) / prompt if prompt else None,
            "ceiling": ceiling(rows, schedule.block_tokens, held=held),
            "round_robin_ceiling": ceiling(rows, schedule.block_tokens, replicas, held=held),
        },
        "group_gap": group_gaps(schedule.cohort, outcomes.records),
        "imbalance": results.imbalance(entry["per_replica"], replicas),
        "preemptions": outcomes.preemptions,
        # once each is what a perfect placement needs, as long as one replica can do an adapter's work
        "adapters": {"loads": outcomes.adapter_loads, "used": len({row.adapter for row in rows} - {None})},
        "engine_queue_max": outcomes.queue_max,
        "queue": _binned(outcomes),
        "disjoint": schedule.recipe.disjoint,
        "setup": setup,
    }
    return entry


def _binned(outcomes: Outcomes) -> dict[str, Any]:
    """Largest number held by the gateways and open at the replicas in each bin of the timeline."""
    bins: dict[str, list[int]] = {"held": [], "at_replicas": []}
    for at, held, open_there in zip(outcomes.sampled_s, outcomes.held, outcomes.waiting, strict=True):
        i = int(max(0.0, at) / results.BIN_S)
        for name, value in (("held", held), ("at_replicas", open_there)):
            column = bins[name]
            column += [0] * (i + 1 - len(column))
            column[i] = max(column[i], value)
    return {"bin_s": results.BIN_S, **bins}


# -- workers -----------------------------------------------------------------------------------------------------------

_campaign: Campaign | None = None  # set before the fork
_schedules: dict[tuple[float, int], Schedule] = {}


def _work(task: Task) -> tuple[Task, dict[str, Any], bytes]:
    campaign = _campaign
    assert campaign is not None
    schedule = _schedules.get((task.load, task.seed))
    if schedule is None:
        _schedules.clear()
        schedule = _schedules[task.load, task.seed] = campaign.offer.schedule(task.seed, task.load)
    gc.collect()
    gc.disable()  # flights and jobs point at each other; collecting while they are alive only costs time
    try:
        entry, rows = campaign.run(task, schedule)
    finally:
        gc.enable()
    return task, entry, rows


def run_all(
    campaign: Campaign, tasks: Sequence[Task], jobs: int, started: Callable[[], None] = lambda: None
) -> Iterator[tuple[Task, dict[str, Any], bytes]]:
    """Results as they come. `jobs` processes; 1 stays in this one. The heaviest loads go first."""
    global _campaign
    _campaign = campaign
    _schedules.clear()
    ordered = sorted(tasks, key=lambda t: (-t.load, t.seed))
    if jobs <= 1:
        started()
        yield from map(_work, ordered)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        started()
        yield from pool.imap_unordered(_work, ordered)


def unbounded(arm: Arm) -> Arm:
    """The same arm without the bound on shedding by size, for goodput with and without it."""
    return replace(arm, settings=replace(arm.settings, size_fairness=float("inf")))
