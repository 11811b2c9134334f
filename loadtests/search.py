"""The highest load that keeps a chosen attainment: bracket, bisect, confirm, with a statistical verdict at each load.

Verdict at a load: pass when the lower Wilson bound of attainment is at least the target and the work open in the last
tenth of the window is at most twice its mean (it does not pass while a backlog grows); fail when the upper bound is
below it; else unresolved. Requests of a run share queues, so counts are divided by a design effect: the variance of
attainment between blocks over the binomial one, at least 1, and 2 where fewer than 3 blocks tell.
Bracket by doubling, bisect to 5 %, confirm with fresh seeds at r (must pass) and 1.05 r (must not).
Loads above capacity are fine: window and drain are fixed and the backlog counts as failures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from policies.statistics import wilson

RESOLUTION = 1.05
DEFAULT_DESIGN_EFFECT = 2.0
FARTHEST = 64.0  # a boundary beyond so many times the start, either way, is not searched for


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    UNRESOLVED = "unresolved"


@dataclass(slots=True, frozen=True)
class Block:
    """One run: counts of its cohort, and whether its queue had settled at the end of the window."""

    good: int
    offered: int
    settled: bool = True


@dataclass(slots=True, frozen=True)
class Probe:
    load: float
    verdict: Verdict
    attainment: float
    low: float
    high: float
    blocks: int
    seeds: tuple[int, ...]
    settled: bool
    confirming: bool = False
    offered: int = 0  # requests of all blocks; 0: there is nothing to be said at this load, nor below it


@dataclass(slots=True)
class Boundary:
    """Where attainment is lost. `load` None: no load passed. `confirmed` None: not tried."""

    load: float | None
    above: float | None  # lowest load that failed above it
    confirmed: bool | None
    monotone: bool
    probes: list[Probe] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(blocks: Sequence[Block], target: float) -> tuple[Verdict, float, float, float]:
    """(verdict, attainment, low, high) of all blocks at one load."""
    good, offered = sum(b.good for b in blocks), sum(b.offered for b in blocks)
    if not offered:
        return Verdict.UNRESOLVED, 0.0, 0.0, 1.0
    effect = design_effect(blocks)
    n = max(1, round(offered / effect))
    share = wilson(min(n, round(good / offered * n)), n)
    settled = sum(b.settled for b in blocks) * 2 > len(blocks)
    if share.high < target:
        verdict = Verdict.FAIL
    elif share.low >= target and settled:
        verdict = Verdict.PASS
    elif share.low >= target:
        verdict = Verdict.FAIL  # good so far, on a backlog that grows
    else:
        verdict = Verdict.UNRESOLVED
    return verdict, good / offered, share.low, share.high


def design_effect(blocks: Sequence[Block]) -> float:
    if len(blocks) < 3:
        return DEFAULT_DESIGN_EFFECT
    good, offered = sum(b.good for b in blocks), sum(b.offered for b in blocks)
    p = good / offered
    binomial = p * (1 - p) * len(blocks) / offered  # variance of a block's share if requests were independent
    if binomial <= 0.0:
        return 1.0
    mean = math.fsum(b.good / b.offered for b in blocks if b.offered) / len(blocks)
    between = math.fsum((b.good / b.offered - mean) ** 2 for b in blocks if b.offered) / (len(blocks) - 1)
    return max(1.0, between / binomial)


class Search:
    """One search of one arm. `run(load, seed) -> Block`; seeds are drawn in order and never used twice at one load."""

    def __init__(
        self,
        run: Callable[[float, int], Block],
        *,
        target: float,
        seeds: Sequence[int],
        fresh: Sequence[int],
        most_blocks: int = 3,
        report: Callable[[Probe], None] = lambda probe: None,
    ) -> None:
        self.run, self.target, self.report = run, target, report
        self.seeds, self.fresh = tuple(seeds), tuple(fresh)
        self.most_blocks = most_blocks  # times len(seeds): how far an unresolved load is extended
        self.probes: list[Probe] = []

    def boundary(self, start: float) -> Boundary:
        """Raises whatever `run` raises."""
        low, high = self._bracket(start)
        while low is not None and high is not None and high / low > RESOLUTION:
            middle = math.sqrt(low * high)
            verdict = self._probe(middle)
            if verdict is Verdict.PASS:
                low = middle
            elif verdict is Verdict.FAIL:
                high = middle
            else:
                break  # the target lies within the interval here: that is as sharp as these blocks see
        confirmed = self._confirm(low) if low is not None and high is not None else None
        passed = [p.load for p in self.probes if p.verdict is Verdict.PASS and not p.confirming]
        failed = [p.load for p in self.probes if p.verdict is Verdict.FAIL and not p.confirming]
        monotone = not passed or not failed or max(passed) < min(failed)
        return Boundary(low, high, confirmed, monotone, self.probes)

    def _bracket(self, start: float) -> tuple[float | None, float | None]:
        low: float | None = None
        high: float | None = None
        load = start
        while low is None or high is None:
            if not start / FARTHEST <= load <= start * FARTHEST:
                break
            if self._probe(load) is Verdict.PASS:
                low = load
                load = load * 2 if high is None else math.sqrt(load * high)
            else:
                if not self.probes[-1].offered:
                    break
                high = load
                load = load / 2
            if low is not None and high is not None:
                break
        return low, high

    def _confirm(self, load: float) -> bool:
        held = self._probe(load, self.fresh, confirming=True)
        lost = self._probe(load * RESOLUTION, self.fresh, confirming=True)
        return held is Verdict.PASS and lost is not Verdict.PASS

    def _probe(self, load: float, seeds: Sequence[int] | None = None, confirming: bool = False) -> Verdict:
        chosen = list(self.seeds if seeds is None else seeds)
        blocks: list[Block] = []
        used: list[int] = []
        while True:
            for seed in chosen:
                blocks.append(self.run(load, seed))
                used.append(seed)
            verdict, share, low, high = judge(blocks, self.target)
            offered = sum(b.offered for b in blocks)
            if not offered or verdict is not Verdict.UNRESOLVED or len(blocks) >= self.most_blocks * len(chosen):
                break
            chosen = [seed + len(chosen) * 1000 for seed in chosen]
        settled = sum(b.settled for b in blocks) * 2 > len(blocks)
        probe = Probe(load, verdict, share, low, high, len(blocks), tuple(used), settled, confirming, offered)
        self.probes.append(probe)
        self.report(probe)
        return verdict
