"""One experiment that runs: who is assigned to what, and what became of it.

Fed at both ends of a request: `assign` on arrival, `finished` with its record. Everything between is the core's. A
request counts once, whatever its attempts; shed and late ones stay in the denominator; what the client itself got
wrong (4xx) stays out of both arms. Strata (service class, length of the prompt) are counted beside the whole.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.announcement import Announcement
from gateway.experiment_table import Experiment
from gateway.record import RequestRecord
from policies.clusters import Clusters
from policies.designs import MOST_WEIGHT, Assigner, Assignment, Design, Plan, weighed, without
from policies.effects import Counts
from policies.guard import Breach, Recent, breach, share, unit, window, window_began
from policies.model import Outcome, Request
from policies.objectives import Partition

ERRORS = frozenset({Partition.ERROR_HTTP, Partition.ERROR_TRANSPORT, Partition.TRUNCATED})
PROMPTS = ((1024, "below 1k"), (4096, "1k to 4k"), (16384, "4k to 16k"), (math.inf, "16k and more"))
PACE_MOST = 10.0  # a stalled stream must not decide a mean: at most so many times its objective
PLAIN_TPOT_S = 0.1  # stands in where a request has no TPOT objective
MOST_STRATA = 24  # classes come from the configuration, so few; a bound all the same


@dataclass(slots=True)
class Phase:
    """Results before weights changed: pooling two weightings would compare different hours (Simpson's paradox)."""

    weights: tuple[float, ...]
    until_unix: float
    counts: Counts


@dataclass(slots=True)
class Trial:
    """`why_stopped`: by arm name. `id` is the experiment's over all gateways, `ledger` names the sums that are ours,
    over restarts too. Owned by `Experiments`."""

    table: Experiment
    plan: Plan
    counts: Counts = field(default_factory=Counts.new)
    strata: dict[str, Counts] = field(default_factory=dict)
    guard: Clusters = field(default_factory=Clusters)
    phases: list[Phase] = field(default_factory=list)
    why_stopped: dict[str, str] = field(default_factory=dict)
    ended_unix: float | None = None
    ended_why: str = ""
    policies: dict[str, str] = field(default_factory=dict)  # by arm, the gateway's own among them
    keyless: int = 0  # requests that had nothing to stay with
    assigned: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    ledger: str = field(default_factory=lambda: secrets.token_hex(8))
    weighed_unix: float = 0.0  # 0: never since the start; sums of two weightings are never added
    untold: bool = False  # begun by our own file, before we heard what the other gateways run
    overdue: Clusters = field(default_factory=Clusters)  # open and late already, as of the last look
    recent: Recent = field(default_factory=Recent)  # what guard rails count, of the present window
    overdue_lately: Recent = field(default_factory=Recent)
    ahead_s: float = 0.0  # of the clock that all gateways share before our own
    _born: float = 0.0  # what came before belongs to another experiment
    _since: float = 0.0  # what came before was assigned by weights or arms that are no more
    _assigner: Assigner = field(init=False)

    def __post_init__(self) -> None:
        self._assigner = Assigner(self.plan)
        self._born = self._born or self.plan.started_unix

    @property
    def running(self) -> bool:
        return self.ended_unix is None

    def assign(self, request: Request, unix: float) -> Assignment | None:
        """Writes arm and group into the request. None: it takes no part, since only one replica may have it.

        unix: of our own clock."""
        if request.pinned is not None:
            return None
        unix += self.ahead_s
        key = self._key(request)
        self.assigned += 1
        if key is None:
            self.keyless += self.table.key != "request"
            key = f"{request.id}@{unix}"
        found = self._assigner.assign(key, unix)
        request.arm, request.group = self.plan.arms[found.arm], found.group
        return found

    def finished(self, record: RequestRecord, given: Assignment) -> None:
        """Counts a request that is over. `given` is what `assign` answered."""
        came = record.received_unix + self.ahead_s
        if record.outcome is Outcome.CLIENT_ERROR or not self.running or came < self._born:
            return
        partition = record.partition
        good, error = partition is Partition.GOOD, partition in ERRORS
        pace = record.tpot_s
        if pace is not None:
            pace = min(PACE_MOST, pace / (record.objectives.tpot_s or PLAIN_TPOT_S))
        prompt = record.prompt.count or record.prompt_bytes // 4
        size = math.log2(1.0 + prompt)
        cell, at = (given.arm, 0), unit(self.plan.design, given, came)
        self.guard.add(cell, at, good, error, pace, size)
        self.recent.add(window(self.plan, came), cell, at, good, error, pace, size)
        if not given.counted or came < self._since:
            return
        self._count(self.counts, given, good, error, pace, size)
        for name in (f"class {record.service_class}", f"prompt {_length(prompt)}"):
            counts = self.strata.get(name)
            if counts is None:
                if len(self.strata) >= MOST_STRATA:
                    continue
                counts = self.strata[name] = Counts.new()
            self._count(counts, given, good, error, pace, size)

    def look(self, overdue: Iterable[tuple[Assignment, float]], unix: float) -> None:
        """Takes note of requests that are open and late already, each with its age in seconds. To guard rails they
        are not good: an arm whose requests never end must not look as well as those that did end."""
        self.overdue, self.overdue_lately = Clusters(), Recent(window(self.plan, unix))
        for given, age_s in overdue:
            came = unix - age_s
            if came >= self._born:
                cell, at = (given.arm, 0), unit(self.plan.design, given, came)
                self.overdue.add(cell, at, False, False, None, 0.0)
                self.overdue_lately.add(window(self.plan, came), cell, at, False, False, None, 0.0)

    def watched(self) -> Clusters:
        """All that guard rails judge by since the start."""
        return self.guard.merged(self.overdue) if self.overdue.rows else self.guard

    def lately(self, number: int) -> Clusters:
        """The same of one window; nothing when it is not the present one."""
        own = self.recent.sums if self.recent.window == number else Clusters()
        return own.merged(self.overdue_lately.sums) if self.overdue_lately.window == number else own

    def judge(self, unix: float, elsewhere: Sequence[Trial] = ()) -> Breach | None:
        """The first arm that breaks a guard rail. `elsewhere`: as other gateways counted."""
        plan, rails, arms, now = self.plan, self.table.rails(), len(self.plan.arms), window(self.plan, unix)
        whole, lately = self.watched(), self.lately(now)
        for part in elsewhere:
            whole, lately = whole.merged(part.guard), lately.merged(part.lately(now))
        for arm in range(1, arms):
            if arm not in plan.stopped:
                found = breach(rails, arms, arm, whole)
                if found is None:
                    found = breach(rails, arms, arm, lately, share(plan, now))
                    since_s = unix - window_began(plan, now)
                    if found is not None:
                        found = replace(found, reason=f"{found.reason}, in the last {since_s:.0f} s")
                if found is not None:
                    return found
        return None

    def stop_arm(self, arm: int, why: str, unix: float) -> None:
        """Its traffic goes to the control. With no arm left the experiment is over. What was counted stays."""
        self._use(without(self.plan, arm, unix), unix)
        self.why_stopped[self.plan.arms[arm]] = why
        if len(self.plan.stopped) == len(self.plan.arms) - 1:
            self.ended_unix, self.ended_why = unix, why

    def weigh(self, weights: Mapping[str, float], unix: float) -> None:
        """New weights of some arms; counting begins anew. Raises ValueError for an unknown arm or a bad weight."""
        for name, weight in weights.items():
            if name not in self.plan.arms:
                raise ValueError(f'arm "{name}" is not known; one of {", ".join(self.plan.arms)} would be right')
            if not 0.0 < weight <= MOST_WEIGHT:
                right = f"a number above 0 and up to {MOST_WEIGHT:g}"
                raise ValueError(f'weight of arm "{name}" is {weight}; {right} would be right')
        if self.plan.design is Design.PARTITION:
            raise ValueError("the groups of a partition are of matched size; its weights cannot be changed")
        mixed = tuple(weights.get(name, w) for name, w in zip(self.plan.arms, self.plan.weights, strict=True))
        self._weighed(mixed, unix, unix)

    def hear(self, said: Announcement, now_unix: float) -> None:
        """What is announced of this experiment, which is all that we know of it and more, holds from now on."""
        self.id, self.untold = said.id, False
        self.table = said.table
        self.plan = replace(self.plan, started_unix=said.started_unix)
        if (said.weights, said.weighed_unix) != (self.plan.weights, self.weighed_unix):
            self._weighed(said.weights, said.weighed_unix, now_unix)
        stopped = frozenset(self.plan.arms.index(name) for name in said.stopped)
        if (stopped, said.moved_unix) != (self.plan.stopped, self.plan.moved_unix):
            self._use(replace(self.plan, stopped=stopped, moved_unix=said.moved_unix), now_unix)
        self._assigner = Assigner(self.plan)
        self.why_stopped = dict(said.stopped)
        self.ended_unix, self.ended_why = said.ended_unix, said.ended_why

    def announcement(self) -> Announcement:
        plan = self.plan
        return Announcement(
            self.id, self.table, plan.started_unix, plan.weights, self.weighed_unix, plan.moved_unix,
            dict(self.why_stopped), self.ended_unix, self.ended_why,
        )  # fmt: skip

    def _weighed(self, weights: tuple[float, ...], unix: float, now_unix: float) -> None:
        self.phases = [*self.phases[-9:], Phase(self.plan.weights, unix, self.counts)]
        self._use(weighed(self.plan, weights, unix), now_unix)
        self.weighed_unix = unix
        self.counts, self.strata, self.guard, self.overdue = Counts.new(), {}, Clusters(), Clusters()
        self.recent, self.overdue_lately = Recent(), Recent()

    def _use(self, plan: Plan, now_unix: float) -> None:
        self.plan = plan
        self._since = now_unix
        self._assigner = Assigner(plan)

    def _key(self, request: Request) -> str | None:
        key = self.table.key
        if key == "session":
            return request.session
        return request.tenant if key == "tenant" else None

    def _count(
        self, counts: Counts, given: Assignment, good: bool, error: bool, pace: float | None, size: float
    ) -> None:
        if self.plan.design is Design.SPLIT:
            counts.buckets.add((given.arm, 0), given.bucket, good, error, pace, size)
            if not self.plan.swings:
                return
        counts.blocks.add((given.arm, given.level), given.block, good, error, pace, size)

    def document(self) -> dict[str, Any]:
        """Plain values for the state file, as `read` takes them."""
        plan = self.plan
        return {
            "table": self.table.model_dump(),
            "started_unix": plan.started_unix,
            "moved_unix": plan.moved_unix,
            "weights": plan.weights,
            "stopped": sorted(plan.stopped),
            "why_stopped": self.why_stopped,
            "ended_unix": self.ended_unix,
            "ended_why": self.ended_why,
            "policies": self.policies,
            "keyless": self.keyless,
            "assigned": self.assigned,
            "id": self.id,
            "ledger": self.ledger,
            "weighed_unix": self.weighed_unix,
            "counts": _written(self.counts),
            "guard": self.guard.document(),
            **self.details(),
        }

    def details(self) -> dict[str, Any]:
        """The part that is large and seldom looked at."""
        return {
            "strata": {name: _written(counts) for name, counts in self.strata.items()},
            "phases": [
                {"weights": p.weights, "until_unix": p.until_unix, "counts": _written(p.counts)} for p in self.phases
            ],
        }

    def sums(self) -> dict[str, Any]:
        """What other gateways add to their own, as `part` takes it."""
        return {
            "weighed_unix": self.weighed_unix,
            "keyless": self.keyless,
            "assigned": self.assigned,
            "counts": _written(self.counts),
            "guard": self.watched().document(),
            "window": self.recent.window,
            "lately": self.lately(self.recent.window).document(),
        }

    def part(self, sums: Mapping[str, Any], details: Mapping[str, Any] | None) -> Trial:
        """This experiment as another gateway counted it. Raises KeyError, TypeError or ValueError."""
        strata, phases = ({}, []) if details is None else (details["strata"], details["phases"])
        return Trial(
            self.table,
            self.plan,
            _read(sums["counts"]),
            {str(name): _read(counts) for name, counts in strata.items()},
            Clusters.read(sums["guard"]),
            [_phase(p) for p in phases],
            dict(self.why_stopped),
            self.ended_unix,
            self.ended_why,
            dict(self.policies),
            int(sums["keyless"]),
            int(sums["assigned"]),
            self.id,
            recent=Recent(int(sums["window"]), Clusters.read(sums["lately"])),
        )


def late(request: Request, now: float) -> bool:
    """Whether the first token of an open request, none seen yet, is overdue. `now`: monotonic seconds."""
    return request.streams and request.generates and request.ttft_deadline is not None and now > request.ttft_deadline


def heard(said: Announcement, now_unix: float) -> Trial:
    """An experiment that others started, with nothing counted yet. Raises ValueError for arms that it does not have."""
    trial = Trial(said.table, said.table.plan(said.started_unix), id=said.id, _born=now_unix)
    trial.hear(said, now_unix)
    trial.phases = []
    return trial


def _phase(p: Mapping[str, Any]) -> Phase:
    return Phase(tuple(float(w) for w in p["weights"]), float(p["until_unix"]), _read(p["counts"]))


def read(document: Mapping[str, Any]) -> Trial:
    """Raises KeyError, TypeError or ValueError for what `Trial.document` did not write."""
    table = Experiment.model_validate(document["table"])
    plan = replace(
        table.plan(float(document["started_unix"])),
        weights=tuple(float(w) for w in document["weights"]),
        stopped=frozenset(int(a) for a in document["stopped"]),
        moved_unix=float(document["moved_unix"]),
    )
    ended = document["ended_unix"]
    return Trial(
        table,
        plan,
        _read(document["counts"]),
        {str(name): _read(counts) for name, counts in document["strata"].items()},
        Clusters.read(document["guard"]),
        [_phase(p) for p in document["phases"]],
        dict(document["why_stopped"]),
        None if ended is None else float(ended),
        str(document["ended_why"]),
        dict(document["policies"]),
        int(document["keyless"]),
        int(document["assigned"]),
        # files of earlier versions have no names: what was started then is known by when
        str(document.get("id", f"{document['started_unix']}")),
        str(document.get("ledger", secrets.token_hex(8))),
        float(document.get("weighed_unix", 0.0)),
    )


def _written(counts: Counts) -> dict[str, Any]:
    return {"blocks": counts.blocks.document(), "buckets": counts.buckets.document()}


def _read(document: Mapping[str, Any]) -> Counts:
    return Counts(Clusters.read(document["blocks"]), Clusters.read(document["buckets"]))


def _length(prompt_tokens: int) -> str:
    return next(name for most, name in PROMPTS if prompt_tokens < most)
