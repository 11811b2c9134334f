"""Do the intervals hold? Each design against a known truth, a thousand times over, with the code that runs live.

The truth is the model's own: every repetition also runs with all traffic on each policy, and the mean of those
differences over all repetitions is the effect. A design covers it when its interval holds it at the end; `always`
when it did at every look. A/A: both arms are the control, and a false difference is an interval that excluded zero at
any look. Seeds are fixed: repetition r has seed r. Only the assignment of keys is redone here in arrays (same shares,
same slices); estimates, variances and intervals are those of `policies/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from loadtests.experiment_model import AFFINITY, SPREAD, Flags, Traffic, World, good, run, traffic
from policies.clusters import GOOD, REQUESTS, SIZE, Clusters, Contrast
from policies.designs import Design, Plan
from policies.effects import Counts, direct, effect
from policies.sequences import anytime, once, planned_information

Arms: TypeAlias = NDArray[np.int8]
LOOKS = 6
SMALLEST = 0.03
SEED = 20_260_101


@dataclass(slots=True)
class Row:
    """What one design said, over repetitions."""

    design: str
    estimates: list[float] = field(default_factory=list)
    halves: list[float] = field(default_factory=list)
    halves_once: list[float] = field(default_factory=list)
    spans: list[list[tuple[float, float]]] = field(default_factory=list)  # by repetition, an interval a look
    false: list[bool] = field(default_factory=list)  # A/A: excluded zero at any look
    reduced: list[float] = field(default_factory=list)  # share of variance that prompt lengths took out

    def covers(self, truth: float) -> float:
        """Share of repetitions whose interval held the truth at the end."""
        return float(np.mean([low <= truth <= high for low, high in (span[-1] for span in self.spans)]))

    def always(self, truth: float) -> float:
        """The same at every look."""
        return float(np.mean([all(low <= truth <= high for low, high in span) for span in self.spans]))

    @property
    def false_share(self) -> float:
        return float(np.mean(self.false))


@dataclass(slots=True)
class Check:
    truth: float
    control: float  # attainment
    rows: dict[str, Row]
    repetitions: int
    seconds: float


@dataclass(slots=True, frozen=True)
class Setting:
    """One design as it is tried."""

    name: str
    plan: Plan
    told: Callable[[Plan, Counts, int], Contrast | None] = effect


def settings(slice_s: float = 60.0, wash_s: float = 15.0) -> list[Setting]:
    base = Plan("check", Design.SPLIT, ("control", "arm"), (1.0, 1.0), 0, 0.0, slice_s, wash_s, 0.0)

    def like(design: Design, swing: float) -> Plan:
        return Plan("check", design, base.arms, base.weights, 0, 0.0, slice_s, wash_s, swing)

    return [
        Setting("plain A/B", base, direct),
        Setting("split", like(Design.SPLIT, 0.8)),
        Setting("partition", like(Design.PARTITION, 0.0)),
        Setting("switchback", like(Design.SWITCHBACK, 0.0)),
    ]


def check(
    world: World, repetitions: int = 1000, seconds: float = 3600.0, chunk: int = 500,
    progress: Callable[[float], None] = lambda share: None,
) -> Check:  # fmt: skip
    """All designs over the same traffic. `progress` is told the share done. Memory: about 35 MB a repetition-hour."""
    rows = {setting.name: Row(setting.name) for setting in settings()}
    truths: list[NDArray[np.float64]] = []
    controls: list[float] = []
    chunks = [range(i, min(i + chunk, repetitions)) for i in range(0, repetitions, chunk)]
    parts = 7 * len(chunks)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(min(1.0, done / parts))

    for block in chunks:
        rng = np.random.default_rng([SEED, block.start])
        load = traffic(world, seconds, len(block), rng)
        step()
        inside = load.at <= seconds
        plain = {}
        for policy in (SPREAD, AFFINITY):
            plain[policy] = good(world, load, run(world, load, np.full(load.at.shape, policy, np.int8))[0])
            step()
        n = inside.sum(0)
        rates = [(plain[p] & inside).sum(0) / n for p in (SPREAD, AFFINITY)]
        truths.append(rates[1] - rates[0])
        controls += list(rates[0])
        for setting in settings():
            arms, levels, blocks, counted, groups = assigned(setting.plan, load, block)
            policy_of = np.where(arms == 0, SPREAD, AFFINITY).astype(np.int8)
            met = good(world, load, run(world, load, policy_of, groups, 1 if groups is None else 2)[0])
            same = plain[SPREAD]
            if groups is not None:
                same = good(world, load, run(world, load, np.zeros_like(policy_of), groups, 2)[0])
            _judge(rows[setting.name], setting, load, (arms, levels, blocks), counted & inside, met, same, seconds)
            step()
    truth = float(np.concatenate(truths).mean())
    return Check(truth, float(np.mean(controls)), rows, repetitions, seconds)


def assigned(
    plan: Plan, load: Traffic, seeds: range
) -> tuple[Arms, Arms, NDArray[np.int32], Flags, NDArray[np.int8] | None]:
    """Arm, level, block, whether counted, and group of each request, as `Assigner` has them."""
    length = plan.slice_s * 2
    finite = np.where(np.isfinite(load.at), load.at, 0.0)
    blocks = (finite // length).astype(np.int32)
    position = ((finite % length) >= plan.slice_s).astype(np.int8)
    counted = finite % plan.slice_s >= plan.wash_s
    last = int(blocks.max()) + 1
    turns = np.empty((last + 1, 2, len(seeds)), np.int8)  # block -1 is the last row
    for r, seed in enumerate(seeds):
        own = Plan(plan.name, plan.design, plan.arms, plan.weights, seed, 0.0, plan.slice_s, plan.wash_s, plan.swing)
        for block in range(-1, last):
            turns[block, :, r] = own.order(block)
    columns = np.arange(len(seeds))[None, :]
    turn = turns[blocks, position, columns]
    if plan.design is Design.SPLIT:
        if not plan.swings:
            arms = (load.drawn >= plan.shares(0)[0] / sum(plan.weights)).astype(np.int8)
            return arms, np.zeros_like(arms), blocks, np.ones_like(counted), None
        control = np.where(turn == 0, plan.shares(0)[0], plan.shares(1)[0])
        return (load.drawn >= control).astype(np.int8), turn, blocks, counted, None
    if plan.design is Design.PARTITION:
        group = (load.drawn >= 0.5).astype(np.int8)
        return ((group + turn) % 2).astype(np.int8), group, blocks, counted, group
    before = np.where(position == 1, turns[blocks, 0, columns], turns[blocks - 1, 1, columns])
    return turn, (before != turn).astype(np.int8), blocks, counted, None


def _judge(
    row: Row, setting: Setting, load: Traffic, cells: tuple[Arms, Arms, NDArray[np.int32]], counted: Flags,
    met: Flags, same: Flags, seconds: float,
) -> None:  # fmt: skip
    planned = planned_information(SMALLEST)
    for r in range(load.at.shape[1]):
        spans: list[tuple[float, float]] = []
        false, found = False, None
        for counts in _looks(setting, load, cells, counted, met, r, seconds):
            found = setting.told(setting.plan, counts, 1)
            interval = anytime(found, planned)
            if interval is not None:
                spans.append((interval.low, interval.high))
        for counts in _looks(setting, load, cells, counted, same, r, seconds):
            interval = anytime(setting.told(setting.plan, counts, 1), planned)
            false |= interval is not None and interval.excludes_zero
        single = once(found)
        assert single is not None
        row.estimates.append(single.estimate)
        row.halves_once.append((single.high - single.low) / 2)
        row.halves.append((spans[-1][1] - spans[-1][0]) / 2)
        row.spans.append(spans)
        row.false.append(false)
        assert found is not None
        row.reduced.append(found.reduced)


def _looks(
    setting: Setting, load: Traffic, cells: tuple[Arms, Arms, NDArray[np.int32]], counted: Flags, met: Flags,
    r: int, seconds: float,
) -> Iterator[Counts]:  # fmt: skip
    """What had been counted at each of the looks, in one repetition."""
    arms, levels, blocks = (part[:, r].astype(np.int64) for part in cells)
    here = counted[:, r]
    time = load.at[:, r]
    buckets = setting.plan.design is Design.SPLIT and not setting.plan.swings
    unit = load.bucket[:, r].astype(np.int64) if buckets else blocks
    units = 256 if buckets else int(seconds // (2 * setting.plan.slice_s))
    place = (arms * 2 + levels) * units + unit
    size = np.log2(1.0 + load.prompt[:, r])
    for look in range(1, LOOKS + 1):
        until = seconds * look / LOOKS
        if not buckets:  # whole blocks only
            until = until // (2 * setting.plan.slice_s) * (2 * setting.plan.slice_s)
        use = here & (time < until)
        weights = (np.ones_like(time), met[:, r].astype(np.float64), size)
        sums = [np.bincount(place[use], weight[use], 4 * units).astype(np.float64) for weight in weights]
        table = _clusters(np.stack(sums, 1).reshape(2, 2, units, 3))
        yield Counts(Clusters(), table) if buckets else Counts(table, Clusters())


def _clusters(sums: NDArray[np.float64]) -> Clusters:
    out = Clusters()
    for arm in range(2):
        for level in range(2):
            rows = {}
            for unit in np.flatnonzero(sums[arm, level, :, 0]):
                n, met, size = sums[arm, level, unit].tolist()
                made = [0.0] * 6
                made[REQUESTS], made[GOOD], made[SIZE] = n, met, size
                rows[int(unit)] = made
            if rows:
                out.rows[arm, level] = rows
    return out
