"""How long an experiment must run: asked before it starts, so that it is not ended when it looks good.

To find a difference d with power 1 - b a look-once test needs se = d / (z(1-a/2) + z(1-b)); the interval that may be
looked at any time needs the se at which its half width plus z(1-b) se is d. From there each design has a law:
split by requests: se^2 = 2 p (1-p) D / n per arm; in time blocks: se^2 = s^2 / blocks, s being the spread of the
difference of two slices. D is the design effect of sessions, 1 + (mean turns - 1) x correlation within (Kish 1965).
Trade-off: the spread of slices is a guess until an A/A run has measured it; the answer says which it used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

from policies.designs import Design
from policies.sequences import half_width, planned_information

SIDE_BY_SIDE = "split, side by side: keys are the unit; its difference is beside the other arm, not of a full switch"


@dataclass(slots=True, frozen=True)
class Needs:
    """What a design needs to find the difference."""

    design: Design
    hours: float
    requests: float  # counted ones
    blocks: float | None  # of slices; None where keys are the unit
    se: float
    why: str


@dataclass(slots=True, frozen=True)
class Traffic:
    """What is known of the traffic before the start."""

    rate_rps: float
    attainment: float
    turns: float = 5.0  # requests of a session
    within: float = 0.1  # correlation of two requests of one session
    slice_spread: float | None = None  # standard deviation of one slice's attainment; None: from sessions and bursts


def measured(requests: Iterable[tuple[float, str | None, bool]], slice_s: float) -> Traffic:
    """What a journal says of its traffic: (unix time, session, good) of each request, in any order.

    within: one-way analysis of variance over sessions (Donner 1986); slice_spread: from differences of neighbouring
    slices, as blocks compare neighbours. Raises ValueError for less than ten slices."""
    rows = sorted(requests, key=lambda row: row[0])
    if not rows or rows[-1][0] - rows[0][0] < 10 * slice_s:
        there = rows[-1][0] - rows[0][0] if rows else 0.0
        raise ValueError(f"holds {there:.0f} s of traffic; at least ten slices of {slice_s:g} s would be right")
    span, n = rows[-1][0] - rows[0][0], len(rows)
    rate, share = n / span, sum(good for _, _, good in rows) / n
    sessions: dict[str, list[int]] = {}
    slices: dict[int, list[int]] = {}
    for i, (unix, session, good) in enumerate(rows):
        for pair in (
            sessions.setdefault(session or f"#{i}", [0, 0]),
            slices.setdefault(int(unix // slice_s), [0, 0]),
        ):
            pair[0] += 1
            pair[1] += good
    k = len(sessions)
    within = 0.0
    if 1 < k < n:
        between = math.fsum(m * (g / m - share) ** 2 for m, g in sessions.values()) / (k - 1)
        inside = math.fsum(g * (1 - g / m) for m, g in sessions.values()) / (n - k)
        size = (n - math.fsum(m * m for m, _ in sessions.values()) / n) / (k - 1)
        within = max(0.0, (between - inside) / (between + (size - 1) * inside)) if between + inside > 0.0 else 0.0
    turns = math.fsum(m * m for m, _ in sessions.values()) / n  # as requests see their sessions
    ordered = [g / m for _, (m, g) in sorted(slices.items())[1:-1]]
    steps = [(b - a) ** 2 for a, b in pairwise(ordered)]
    spread = math.sqrt(math.fsum(steps) / len(steps) / 2.0) if steps else None
    return Traffic(rate, share, turns, within, spread)


def needed_se(smallest: float, power: float = 0.8, alpha: float = 0.05) -> float:
    """The standard error at which the anytime interval excludes zero with this power, the truth being `smallest`."""
    planned = planned_information(smallest, alpha, power)
    z = NormalDist().inv_cdf(power)
    low, high = 0.0, smallest
    for _ in range(60):
        se = (low + high) / 2
        if half_width(se, planned, alpha) + z * se < smallest:
            low = se
        else:
            high = se
    return low


def needs(
    design: Design, traffic: Traffic, smallest: float, weights: tuple[float, ...], slice_s: float, wash_s: float,
    swing: float = 0.8, power: float = 0.8,
) -> Needs:  # fmt: skip
    """Time until `smallest` (share of requests) is found in one arm against the control. Raises ValueError."""
    if not 0.0 < smallest < 1.0:
        raise ValueError(f"difference {smallest}: a share above 0 and below 1 would be right")
    if not 0.0 < traffic.attainment < 1.0:
        raise ValueError(f"attainment {traffic.attainment:g}: a share above 0 and below 1 would be right")
    if traffic.rate_rps <= 0.0:
        raise ValueError(f"rate {traffic.rate_rps:g}: more than 0 requests a second would be right")
    se = needed_se(smallest, power)
    p = traffic.attainment
    inflation = 1.0 + (traffic.turns - 1.0) * traffic.within
    shares = [w / sum(weights) for w in weights]
    counted = max(1e-9, 1.0 - wash_s / slice_s)
    if design is Design.SPLIT and (swing == 0.0 or len(weights) != 2):
        least = min(shares[1:])
        requests = p * (1 - p) * inflation * (1 / least + 1 / shares[0]) / (se * se)
        hours = requests / traffic.rate_rps / 3600.0
        return Needs(
            design,
            hours,
            requests,
            None,
            se,
            SIDE_BY_SIDE,
        )
    per_slice = traffic.rate_rps * slice_s * counted
    arms = len(weights)
    if design is Design.PARTITION:
        per_slice /= arms
    spread = traffic.slice_spread
    why = "in slices of time: their spread is as measured"
    if spread is None:
        why = "in slices of time: their spread is not known and taken from sessions alone, so these are lower bounds"
    own = math.sqrt(p * (1 - p) * inflation / max(per_slice, 1.0))
    if spread is not None and design is Design.PARTITION:
        spread *= math.sqrt(arms)  # a group has only its part of the traffic
    spread = own if spread is None else max(spread, own)
    variance = 2.0 * spread * spread  # of the difference of two slices
    if design is Design.SPLIT:
        control = shares[0]
        moved = swing * min(control, 1.0 - control)
        high, low = control + moved, control - moved
        back = (1.0 - high) / (high - low), low / (high - low)
        variance = spread * spread * sum(
            (1.0 + x) ** 2 / major + x * x / minor
            for x, major, minor in ((back[0], high, low), (back[1], 1.0 - low, 1.0 - high))
        )  # fmt: skip
    elif design is Design.PARTITION:
        variance /= arms
    blocks = max(10.0, variance / (se * se))
    slices = 2 if design is Design.SPLIT else arms
    seconds = blocks * slices * slice_s
    return Needs(design, seconds / 3600.0, seconds * traffic.rate_rps * counted, blocks, se, why)
