"""`[experiment]`, `[[experiment.arms]]` and `[shadow]` of the configuration, and what they mean to the core.

The same table is the body of `POST /admin/experiment`. Arms of a split or a partition differ in their routing policy
only: admission and pacing hold one queue for the whole gateway, so arms that differ there must take turns (switchback).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from pydantic import Field

from gateway.sections import Name, RateOrNone, Share, Table
from policies import POLICIES
from policies.designs import MOST_WEIGHT, Design, Plan
from policies.guard import Rails
from policies.settings import Settings, chosen


class Arm(Table):
    name: Name = ""
    """Name in metrics, journal and results."""
    policy: str | None = None
    """Routing policy, without +admission or +pacing; left out: the running one."""
    settings: dict[str, Any] = Field(default={})
    """Settings of that policy, as its documentation names them."""
    core: dict[str, Any] = Field(default={})
    """Changes to admission and pacing, as {pacing = false} or {backlog_s = 0.5}; only in a switchback."""
    weight: float = Field(default=1.0, gt=0, le=MOST_WEIGHT)
    """Share of the traffic, against the other arms; in a switchback of the time."""


class Experiment(Table):
    name: Name = "experiment"
    """Names the experiment; the same name after a restart goes on with the same counts."""
    design: Literal["split", "partition", "switchback"] = "split"
    """How traffic is divided: by key over one fleet, by key over parts of the fleet, or by time."""
    key: Literal["session", "tenant", "request"] = "session"
    """What stays with its arm; requests without it are assigned one by one."""
    seed: int = 0
    """Seed of the assignment; gateways that share an experiment need the same."""
    slice_s: float = Field(default=120.0, ge=1, le=31_536_000)
    """Length of a slice of time, of a switchback, a partition or a swinging split."""
    wash_s: float = Field(default=20.0, ge=0)
    """Beginning of each slice that is not counted, while queues and caches of the slice before wear off."""
    swing: Share = 0.8
    """How far a split of two arms swings its shares from slice to slice, to see interference; 0 keeps them."""
    probation_s: float = Field(default=120.0, ge=0, le=86_400.0)
    """Time at the start that is not counted, in which guard rails look: shares do not swing, turns take 5 s."""
    smallest: float = Field(default=0.02, ge=0.0001, lt=1)
    """Difference in attainment that would matter; the intervals are sharpest where it is found."""
    attainment_drop: RateOrNone = 0.05
    """Guard rail: an arm whose attainment is surely this far below the control's is stopped; "none" for no rail."""
    error_rise: RateOrNone = 0.02
    """Guard rail: the same for its share of errors above the control's; "none" for no rail."""
    pace_rise: RateOrNone = 0.25
    """Guard rail: the same for its time per token, as a share of the control's; "none" for no rail."""
    hours: RateOrNone = None
    """Ends by itself after this time; "none": when it is stopped."""
    arms: list[Arm] = Field(default=[])
    """Two or more arms; the first is the control."""

    def plan(self, started_unix: float) -> Plan:
        return Plan(
            name=self.name,
            design=Design(self.design),
            arms=tuple(arm.name for arm in self.arms),
            weights=tuple(arm.weight for arm in self.arms),
            seed=self.seed,
            started_unix=started_unix,
            slice_s=self.slice_s,
            wash_s=self.wash_s,
            swing=self.swing,
            probation_s=self.probation_s,
        )

    def rails(self) -> Rails:
        return Rails(self.attainment_drop, self.error_rise, self.pace_rise)


class Shadow(Table):
    policies: list[str] = Field(default=[])
    """Policies that say what they would have done with the same requests, without acting; at most 4."""
    share: Share = 0.05
    """Share of requests they are asked about; it bounds what they cost."""


def mistakes(table: Experiment, base: Settings) -> list[str]:
    """What no single key can see, one line each."""
    lines = []
    if len(table.arms) < 2 or len(table.arms) > 8:
        lines.append(f"experiment.arms: {len(table.arms)} arms; 2 to 8 would be right, the first is the control")
    names = [arm.name for arm in table.arms]
    lines += [
        f'experiment.arms[{i}].name = "{name}": is taken by arms[{names.index(name)}]'
        for i, name in enumerate(names)
        if name and names.index(name) != i
    ]
    lines += [f"experiment.arms[{i}].name: is missing" for i, name in enumerate(names) if not name]
    timed = table.design != "split" or (table.swing > 0 and len(table.arms) == 2)
    if timed and table.wash_s >= table.slice_s:
        lines.append(f"experiment.wash_s = {table.wash_s:g}: must be below slice_s, which is {table.slice_s:g}")
    if table.design == "partition" and len({arm.weight for arm in table.arms}) > 1:
        lines.append("experiment.arms: the groups of a partition are of matched size, so all weights must be equal")
    for i, arm in enumerate(table.arms):
        where = f"experiment.arms[{i}]"
        if arm.policy is not None:
            if arm.policy not in POLICIES:
                suffix = "; admission and pacing are switched in core" if "+" in arm.policy else ""
                lines.append(f'{where}.policy = "{arm.policy}": must be one of {", ".join(POLICIES)}{suffix}')
                continue
            lines += _refused(f"{where}.settings", arm.policy, arm.settings)
        elif arm.settings:
            lines.append(f"{where}.settings: name the policy that they belong to")
        if arm.core and table.design != "switchback":
            lines.append(f'{where}.core: arms share one queue here; only design = "switchback" can change it')
        try:
            core(base, arm.core)
        except (TypeError, ValueError) as e:
            lines.append(f"{where}.core: {e}")
    return lines


def shadow_mistakes(table: Shadow) -> list[str]:
    lines = [
        f'shadow.policies[{i}] = "{name}": must be one of {", ".join(POLICIES)}'
        for i, name in enumerate(table.policies)
        if name not in POLICIES
    ]
    if len(table.policies) > 4:
        lines.append(f"shadow.policies: {len(table.policies)} policies; at most 4 would be right")
    return lines


def core(base: Settings, changes: Mapping[str, Any]) -> Settings:
    """The core's settings of an arm. Raises ValueError naming what is wrong."""
    return chosen({**asdict(base), **changes})


def _refused(where: str, policy: str, settings: Mapping[str, Any]) -> Sequence[str]:
    try:
        POLICIES[policy].make(settings, random.Random(0))
    except ValueError as e:
        return [f"{where}: {e}"]
    return []
