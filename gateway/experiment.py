"""The experiments of one gateway: starts and stops them, keeps them over restarts, and watches their guard rails.

While one runs, the core's policy is a `SideBySide` of its arms; the policy of the configuration listens along and takes
over again at the end. In a switchback the core's settings change with the slice. Counts are written every few seconds
to a file beside the journal, whole and by rename, so a crash loses seconds and never the file. The same table (name,
seed, arms) assigns the same keys to the same arms at every gateway. Gateways that share a Redis run one experiment:
what one starts, weighs or stops is `hear`d by all, and guard rails and results are of the sums of all (`others`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway import trial as trials
from gateway.announcement import Announcement, alike, joined, same
from gateway.config import Config, ConfigError
from gateway.experiment_merge import merged
from gateway.experiment_results import results
from gateway.experiment_series import series
from gateway.experiment_table import Experiment, core, mistakes
from gateway.lost_cancel import told_to_end
from gateway.record import RequestRecord
from gateway.scheduler import Scheduler
from gateway.shadows import Shadows, bare
from gateway.trial import Trial
from policies import make
from policies.designs import Assignment, Design
from policies.policy import RoutingPolicy
from policies.settings import Settings
from policies.side_by_side import SideBySide

SCHEMA = 1
JUDGE_S = 1.0
SAVE_S = 10.0
log = logging.getLogger("forebay.experiment")


def state_path(config: Config) -> Path | None:
    """Beside the journal; without a journal nothing outlives the process."""
    path = config.journal.path
    return None if path is None else Path(path).with_name(Path(path).name + ".experiment.json")


class Others(Protocol):
    """The gateways that run the same experiment, as far as we heard of them."""

    @property
    def up(self) -> bool:
        """Whether we hear of them now."""

    def parts(self, trial: Trial, whole: bool) -> Sequence[Trial]:
        """What they counted; not whole: without what guard rails do not ask."""


class Experiments(Collector):
    """At most one runs. `on_change` is told the trial that requests are to be assigned by, or None."""

    def __init__(
        self, scheduler: Scheduler, path: Path | None, on_change: Callable[[Trial | None], None],
        shadows: Shadows,
        wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.path = path
        self.shadows = shadows
        self.wall = wall
        self.ahead_s = 0.0  # of the clock that all gateways share before `wall`
        self.others: Others | None = None  # None: this gateway shares nothing
        self.overdue: Callable[[], Iterable[tuple[Assignment, float]]] = lambda: ()  # set by whoever serves requests
        self.trial: Trial | None = None  # the last one, running or ended
        self._on_change = on_change
        self._base: RoutingPolicy | None = None  # while one runs: what runs without it
        self._base_settings: Settings | None = None
        self._policies: dict[str, str] = {}  # arm: name of its policy
        self._applied = 0  # arm whose settings the core has
        self._saved_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    def begin(self, config: Config) -> None:
        """At the start of the process: the file's experiment, or the one that ran when the process ended."""
        known = self._read()
        wanted = config.experiment
        if known is not None and (wanted is None or known.table == wanted):
            self.trial = known
            if known.running:
                log.info("experiment %s goes on with what was counted before", known.plan.name)
                self._run(known, config)
        elif wanted is not None:
            self.start(wanted, config)
            if self.trial is not None:
                self.trial.untold = self.others is not None
        self._task = asyncio.create_task(self._watch())

    async def end(self) -> None:
        """At the end of the process; what runs is resumed at the next start."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._save()

    # -- what operators do ---------------------------------------------------------------------------------------

    @property
    def running(self) -> Trial | None:
        trial = self.trial
        return trial if trial is not None and trial.running else None

    def check(self, table: Experiment, config: Config) -> None:
        """Raises ConfigError with every mistake."""
        lines = mistakes(table, config.arm().settings)
        if lines:
            raise ConfigError(lines)

    def start(self, table: Experiment, config: Config) -> list[str]:
        """Raises ConfigError when it cannot run, or another one does."""
        self.check(table, config)
        if self.running is not None:
            if self.others is not None and self.running.table == table:
                return [f"experiment {table.name}: runs at all gateways already"]
            raise ConfigError([f'experiment "{self.running.plan.name}" is running; stop it first'])
        small = self._too_small(table)
        if small:
            raise ConfigError(small)
        trial = self.trial = Trial(table, table.plan(self.now()))
        self._run(trial, config)
        self._save()
        return [f"experiment {table.name}: {table.design} of {', '.join(trial.plan.arms)}"]

    def stop(self, why: str, arm: str | None = None) -> list[str]:
        """Ends it, or takes one arm out of it. Raises ConfigError when none runs or the arm is not one of its own."""
        trial = self.running
        if trial is None:
            if self.trial is not None and self.others is not None:  # told to one gateway after another
                return [f"experiment {self.trial.plan.name}: has ended already ({self.trial.ended_why})"]
            raise ConfigError(["no experiment is running"])
        if arm is None:
            trial.ended_unix, trial.ended_why = self.now(), why
        else:
            if arm not in trial.plan.arms:
                others = ", ".join(trial.plan.arms[1:])
                raise ConfigError([f'arm "{arm}" is not known; one of {others} would be right'])
            if arm == trial.plan.arms[0]:
                raise ConfigError([f'arm "{arm}" is the control; stop the whole experiment instead'])
            if arm in trial.why_stopped:
                return [f"experiment {trial.plan.name}: arm {arm} is stopped already ({trial.why_stopped[arm]})"]
            trial.stop_arm(trial.plan.arms.index(arm), why, self.now())
        if trial.running:
            self._turn(trial)
        else:
            self._restore()
        self._save()
        return [f"experiment {trial.plan.name}: {'ended' if arm is None else f'arm {arm} stopped'} ({why})"]

    def weigh(self, weights: Mapping[str, float]) -> list[str]:
        """Raises ConfigError when none runs or a weight cannot be."""
        trial = self.running
        if trial is None:
            raise ConfigError(["no experiment is running"])
        before = trial.plan.weights
        known = dict(zip(trial.plan.arms, before, strict=True))
        if self.others is not None and weights.items() <= known.items():
            return [f"experiment {trial.plan.name}: weights are {list(before)} already"]
        try:
            trial.weigh(weights, self.now())
        except ValueError as e:
            raise ConfigError([str(e)]) from None
        self._save()
        return [f"experiment {trial.plan.name}: weights {list(before)} -> {list(trial.plan.weights)}"]

    def hear(self, said: Announcement, config: Config) -> None:
        """What other gateways know holds here too, and what we know besides. Raises ConfigError when it cannot run."""
        mine = self.trial
        own = None if mine is None else mine.announcement()
        if mine is not None and own is not None:
            lead = mine.untold and alike(own.table, said.table)  # they know better what became of our file's
            if lead or same(own, said):
                self._follow(mine, said if lead else joined(own, said))
                return
            if joined(own, said) is own:
                return
        if said.running:
            self.check(said.table, config)
            if small := self._too_small(said.table):
                raise ConfigError(small)
        if mine is not None and mine.running:
            self.stop(f'experiment "{said.table.name}" was started at another gateway')
        trial = self.trial = trials.heard(said, self.now())
        if said.running:
            log.info("experiment %s was started at another gateway and runs here too", trial.plan.name)
            self._run(trial, config)
        self._save()

    def _follow(self, trial: Trial, said: Announcement) -> None:
        if said == trial.announcement():
            trial.untold = False
            return
        name, before, running = trial.plan.name, dict(trial.why_stopped), trial.running
        trial.hear(said, self.now())
        for arm in said.stopped.keys() - before.keys():
            log.warning("experiment %s: arm %s was stopped at another gateway: %s", name, arm, said.stopped[arm])
        if running and not trial.running:
            log.warning("experiment %s was ended at another gateway: %s", name, said.ended_why)
            self._restore()
        elif running:
            self._turn(trial)
        self._save()

    def leave(self, before: Config, after: Config) -> None:
        """The configuration changes: its experiment is weighed anew or ends. `refuses` was asked first."""
        trial, wanted = self.running, after.experiment
        if trial is None or trial.table != before.experiment or wanted == before.experiment:
            return
        if wanted is not None and alike(wanted, trial.table):
            self.weigh({arm.name: arm.weight for arm in wanted.arms})
            trial.table = wanted
        else:
            self.stop("taken out of the configuration")

    def enter(self, before: Config, after: Config) -> None:
        """The configuration changed: its experiment starts."""
        wanted = after.experiment
        if wanted is not None and wanted != before.experiment and self.running is None:
            self.start(wanted, after)

    def refuses(self, before: Config, after: Config) -> list[str]:
        """Why this change of configuration cannot be made now."""
        trial = self.running
        if trial is None:
            starts = after.experiment is not None and after.experiment != before.experiment
            return self._too_small(after.experiment) if starts and after.experiment is not None else []
        ends = trial.table == before.experiment and after.experiment != before.experiment
        if not ends and (after.policy != before.policy or after.arm().settings != before.arm().settings):
            return [f'experiment "{trial.plan.name}" is running: stop it before policy, admission or pacing change']
        if not ends and after.experiment not in (None, before.experiment, trial.table):
            return [f'experiment "{trial.plan.name}" is running; stop it first']
        return []

    def _too_small(self, table: Experiment) -> list[str]:
        replicas = len(self.scheduler.balancer.fleet.replicas)
        if table.design != "partition" or not 0 < replicas < 2 * len(table.arms):  # 0: the process only begins
            return []
        wanted = f"a partition needs two replicas an arm, so {2 * len(table.arms)}; there are {replicas}"
        return [f"experiment.design: {wanted}"]

    def results(self) -> dict[str, Any]:
        """The last experiment, running or ended; {"state": "none"} where there never was one."""
        trial = self.trial
        if trial is None:
            return {"state": "none", "arms": []}
        if self.others is None:
            return results(trial, self.now()) | {"gateways": None}
        parts = [trial, *self.others.parts(trial, True)]
        told = results(merged(parts), self.now()) | {"gateways": len(parts)}
        if not self.others.up:
            told["notes"].append("Redis is away: what other gateways counted is as it was heard last")
        return told

    def document(self) -> dict[str, Any]:
        """Its raw counts, which `forebay experiment status` adds up over gateways."""
        return {} if self.trial is None else self.trial.document()

    # -- what requests do ----------------------------------------------------------------------------------------

    def finished(self, record: RequestRecord, given: Assignment) -> None:
        if self.trial is not None:
            self.trial.finished(record, given)

    def policy_of(self, arm: str | None) -> str:
        """Name of the policy that decided a request of this arm, or of none."""
        own = (self._base or bare(self.scheduler.balancer.policy)).name
        return own if arm is None else self._policies.get(arm, own)

    def collect(self) -> Iterator[Metric]:
        """Series by arm; their names are the configuration's, so there are at most eight."""
        return series(self.results())

    # -- inside --------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Unix seconds of the clock that slices and starts are told by."""
        return self.wall() + self.ahead_s

    def lead(self, ahead_s: float) -> None:
        """The clock that all gateways share is so far ahead of our own."""
        self.ahead_s = ahead_s
        if self.trial is not None:
            self.trial.ahead_s = ahead_s

    def _run(self, trial: Trial, config: Config) -> None:
        scheduler, balancer, plan = self.scheduler, self.scheduler.balancer, trial.plan
        base = self._base = bare(balancer.policy)
        self._base_settings = balancer.settings
        trial.ahead_s = self.ahead_s
        arms: dict[str, RoutingPolicy] = {}
        for i, arm in enumerate(trial.table.arms):
            same = arm.policy is None or (arm.policy == base.name and arm.settings == config.policy.settings)
            seed = plan.seed + i if config.policy.seed is not None else None
            arms[arm.name] = base if same else make(arm.policy or base.name, arm.settings, random.Random(seed))
        self._policies = trial.policies = {name: policy.name for name, policy in arms.items()}
        groups = plan.groups if plan.design is Design.PARTITION else None
        scheduler.use(self.shadows.wrap(SideBySide(arms, plan.arms[0], groups, base)))
        self._applied = -1
        self._turn(trial)
        self._on_change(trial)

    def _restore(self) -> None:
        if self._base is not None and self._base_settings is not None:
            self.scheduler.use(self.shadows.wrap(self._base))
            self.scheduler.configure(self._base_settings)
        self._base = self._base_settings = None
        self._on_change(None)

    def _turn(self, trial: Trial) -> None:
        """A switchback whose arms differ in admission or pacing: the core gets the settings of the arm whose turn it
        is. Requests that still wait are decided by them too, which is what the wash of a slice is for."""
        if trial.plan.design is not Design.SWITCHBACK or self._base_settings is None:
            return
        arm = trial.plan.active(self.now())
        if arm != self._applied:
            self._applied = arm
            changed = core(self._base_settings, trial.table.arms[arm].core)
            if changed != self.scheduler.balancer.settings:
                self.scheduler.configure(changed)

    def tick(self) -> None:
        """What time brings: turns, guard rails, the end, the state file."""
        trial = self.running
        if trial is None:
            return
        now = self.now()
        self._turn(trial)
        trial.look(self.overdue(), now)
        found = trial.judge(now, () if self.others is None else self.others.parts(trial, False))
        if found is not None:
            name = trial.plan.arms[found.arm]
            log.warning("experiment %s: arm %s is stopped: %s", trial.plan.name, name, found.reason)
            self.stop(f"guard rail: {found.reason}", name)
        elif trial.table.hours is not None and now - trial.plan.started_unix >= trial.table.hours * 3600.0:
            self.stop(f"its {trial.table.hours:g} hours are over")
        elif now - self._saved_at >= SAVE_S:
            self._save()

    async def _watch(self) -> None:
        while not told_to_end():
            trial = self.running
            wait = JUDGE_S
            if trial is not None and trial.plan.design is Design.SWITCHBACK:
                wait = min(wait, trial.plan.moment(self.now()).left_s + 0.001)
            await asyncio.sleep(wait)
            try:
                self.tick()
            except Exception:
                log.exception("the experiment could not be judged")

    def _save(self) -> None:
        self._saved_at = self.now()
        if self.path is None or self.trial is None:
            return
        part = self.path.with_name(self.path.name + ".part")
        try:
            part.write_bytes(orjson.dumps({"schema": SCHEMA, **self.trial.document()}))
            part.replace(self.path)
        except OSError as e:
            log.error("experiment: its counts cannot be kept in %s: %s", self.path, e.strerror)

    def _read(self) -> Trial | None:
        if self.path is None or not self.path.exists():
            return None
        try:
            document = orjson.loads(self.path.read_bytes())
            if document["schema"] != SCHEMA:
                raise ValueError(f"schema {document['schema']}; {SCHEMA} would be right")
            return trials.read(document)
        except (OSError, KeyError, TypeError, ValueError) as e:
            log.error("experiment: %s cannot be read and is left alone: %s", self.path, e)
            self.path = None
            return None
