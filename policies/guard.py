"""Guard rails: an arm that does harm is stopped, and its traffic returns to the control.

Three questions, asked again and again: has attainment fallen, have errors risen, has the pace of streams (TPOT over its
objective) slowed by more than the bound allows? Each is a contrast of clusters, judged by a confidence sequence, so
that asking often does not stop good arms: a rail breaks when its whole interval lies beyond the bound, at a level
shared among rails and arms (Bonferroni). Half of it is for all since the start, which finds small harm; half for
windows of ten minutes, each judged by itself, the k-th at 1 / (k (k + 1)) of that half, so that an arm that was good
for days is stopped within minutes of turning bad. The unit is the bucket of keys where arms run side by side, and a few
seconds of time where they take turns. Trade-off: a small harm within the bound is let live until the experiment ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.clusters import ERRORS, GOOD, PACE, PACED, REQUESTS, Cell, Clusters, contrast
from policies.designs import Assignment, Design, Plan
from policies.sequences import anytime

SINCE_THE_START = 0.5  # of alpha; the rest is for windows
PLANNED = 1000.0  # information at which a rail is sharpest: a standard error of 0.03, some 500 requests an arm
WINDOW_S = 600.0  # at least, and two blocks of slices
BIN_S = 2.5  # unit of time where arms take turns: half a slice on probation


@dataclass(slots=True, frozen=True)
class Rails:
    """Bounds against the control; None switches one off."""

    attainment_drop: float | None = 0.05
    error_rise: float | None = 0.02
    pace_rise: float | None = 0.25  # relative: 0.25 is a quarter slower
    alpha: float = 0.02  # chance to stop an arm that is exactly at a bound, over the whole experiment
    least_requests: int = 100  # of each of the two, before anything is judged


@dataclass(slots=True, frozen=True)
class Breach:
    arm: int
    rail: str  # attainment | errors | pace
    estimate: float  # of the difference; pace: of the arm's over the bound
    bound: float
    reason: str  # one sentence


@dataclass(slots=True)
class Recent:
    """Sums of the newest window."""

    window: int = -1
    sums: Clusters = field(default_factory=Clusters)

    def add(self, window: int, cell: Cell, unit: int, good: bool, error: bool, pace: float | None, size: float) -> None:
        if window > self.window:
            self.window, self.sums = window, Clusters()
        if window == self.window:  # who came in an earlier one is counted there or not at all
            self.sums.add(cell, unit, good, error, pace, size)


def window(plan: Plan, unix: float) -> int:
    """Windows begin at whole multiples of their length, as slices do."""
    return int(unix / _window_s(plan))


def window_began(plan: Plan, window: int) -> float:
    return max(plan.started_unix, window * _window_s(plan))


def share(plan: Plan, window: int) -> float:
    """Of alpha, that the windows have."""
    k = window - int(plan.started_unix / _window_s(plan)) + 1
    return SINCE_THE_START / (k * (k + 1)) if k > 0 else 0.0


def _window_s(plan: Plan) -> float:
    return WINDOW_S if plan.design is Design.SPLIT else max(WINDOW_S, 2.0 * plan.slice_s * plan.slices)


def unit(design: Design, given: Assignment, unix: float) -> int:
    """What a request that came at `unix` is counted under."""
    return given.bucket if design is Design.SPLIT else int(unix / BIN_S)


def breach(rails: Rails, arms: int, arm: int, counts: Clusters, share: float = SINCE_THE_START) -> Breach | None:
    """The first rail that an arm has broken. `counts`: cells (arm, 0) by unit of the guard; share: of alpha."""
    if min(counts.total(arm, REQUESTS), counts.total(0, REQUESTS)) < rails.least_requests:
        return None
    asked = [bound is not None for bound in (rails.attainment_drop, rails.error_rise, rails.pace_rise)]
    alpha = 2.0 * share * rails.alpha / (max(1, sum(asked)) * max(1, arms - 1))  # one side only
    against: dict[Cell, float] = {(arm, 0): 1.0, (0, 0): -1.0}
    if rails.attainment_drop is not None:
        found = anytime(contrast(counts, against, GOOD, REQUESTS), PLANNED, alpha)
        if found is not None and found.high < -rails.attainment_drop:
            said = f"attainment is {-found.estimate:.1%} below the control's, at least {-found.high:.1%}"
            return Breach(arm, "attainment", found.estimate, -rails.attainment_drop, said)
    if rails.error_rise is not None:
        found = anytime(contrast(counts, against, ERRORS, REQUESTS), PLANNED, alpha)
        if found is not None and found.low > rails.error_rise:
            said = f"errors are {found.estimate:.1%} of requests above the control's, at least {found.low:.1%}"
            return Breach(arm, "errors", found.estimate, rails.error_rise, said)
    if rails.pace_rise is not None:
        allowed: dict[Cell, float] = {(arm, 0): 1.0, (0, 0): -(1.0 + rails.pace_rise)}
        found = anytime(contrast(counts, allowed, PACE, PACED), PLANNED, alpha)
        if found is not None and found.low > 0.0:
            said = f"time per token is more than {rails.pace_rise:.0%} above the control's"
            return Breach(arm, "pace", found.estimate, rails.pace_rise, said)
    return None
