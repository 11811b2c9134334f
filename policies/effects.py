"""Which contrast of cells answers which question, by design.

effect: what changing all traffic from the control to an arm would do. In a swinging split the rates of each arm at two
shares are drawn on in a straight line to a share of one: R(1) = R_high + (1 - p_high) / (p_high - p_low) x
(R_high - R_low). direct: the arms as they stand beside each other, which is what a plain A/B test reports; what is
between the two is interference. carry_over: slices after another arm minus slices after the same.
Trade-off: a straight line through two points cannot see a bend; the default swing leaves a tenth to be drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.clusters import GOOD, REQUESTS, Cell, Clusters, Contrast, contrast, difference
from policies.designs import Design, Plan


@dataclass(slots=True)
class Counts:
    """Everything counted since counting began: by block of time, and by hash bucket of the key."""

    blocks: Clusters
    buckets: Clusters

    @classmethod
    def new(cls) -> Counts:
        return cls(Clusters(), Clusters())

    def merged(self, other: Counts) -> Counts:
        return Counts(self.blocks.merged(other.blocks), self.buckets.merged(other.buckets))


def effect(plan: Plan, counts: Counts, arm: int, top: int = GOOD, bottom: int = REQUESTS) -> Contrast | None:
    """Arm minus control if all traffic went to one or the other."""
    if plan.swings:
        return contrast(counts.blocks, total(plan), top, bottom)
    return direct(plan, counts, arm, top, bottom)


def direct(plan: Plan, counts: Counts, arm: int, top: int = GOOD, bottom: int = REQUESTS) -> Contrast | None:
    """Arm minus control as they stand beside each other."""
    if plan.design is Design.SPLIT:
        return contrast(counts.buckets, difference(arm), top, bottom)
    if plan.design is Design.PARTITION:
        return contrast(counts.blocks, difference(arm, range(len(plan.arms))), top, bottom)
    return contrast(counts.blocks.without_levels(), difference(arm), top, bottom)


def interference(plan: Plan, counts: Counts) -> Contrast | None:
    """What a plain reading of a swinging split misses: effect minus direct, over the same blocks. Else None."""
    if not plan.swings:
        return None
    beside: dict[Cell, float] = difference(1, (0, 1))
    both = total(plan)
    return contrast(counts.blocks, {cell: both.get(cell, 0.0) - beside.get(cell, 0.0) for cell in both | beside})


def carry_over(plan: Plan, counts: Counts, arm: int) -> Contrast | None:
    """Switchback: rate of an arm in slices after another arm minus in slices after its own. Else None.

    Zero, within its interval, is what a wash long enough gives."""
    if plan.design is not Design.SWITCHBACK:
        return None
    return contrast(counts.blocks, {(arm, 1): 1.0, (arm, 0): -1.0})


def total(plan: Plan) -> dict[Cell, float]:
    """Coefficients of the effect in a swinging split; shares are of the control."""
    high, low = plan.shares(0)[0], plan.shares(1)[0]
    control, arm = (1.0 - high) / (high - low), low / (high - low)
    return {(1, 1): 1.0 + arm, (1, 0): -arm, (0, 0): -(1.0 + control), (0, 1): control}
