"""Bounds on refusing: who may not bear more of it, and whose next turn is refused too.

A request is refused when it is infeasible: past its latest start = deadline - margin x predicted service it cannot
meet its objective anywhere, and is told at once instead of timing out (`binding.py`); or, under overload, when it costs
more than the price (`price.py`), which hits long prompts first. `SizeFairness` bounds that: no prompt-length quartile
is refused more than twice the average, and above 40 % average no quartile's attainment falls below 0.3 of the
best one's. Trade-off: counts good requests forgone for fairness; an infinite bound switches it off.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from enum import Enum
from typing import Final

MEMORY: Final = 0.998  # per arrival: about 500 requests
AIM: Final = 0.88  # of the bound, at first and at least: refusals come in bursts, and some are not planned
LEAST_AIM: Final = 0.8
REACHED: Final = 0.95  # of the bound the worst quartile should come to; the aim follows
RAISE: Final = 1.002  # of the aim, each time thresholds are set
LOWER: Final = 0.998
HEAVY_SHED: Final = 0.4  # average shed share above which the second bound holds
WORST_TO_BEST: Final = 0.35  # served share of the worst quartile against the best: 0.3 and room for those served late


class Why(Enum):
    """What an infeasible request was refused for."""

    LATE = "late"  # feasible when it came, so the fleet has less capacity than was believed
    NOW = "now"  # not feasible when it came
    PRICED = "priced"
    HOPELESS = "hopeless"  # nor would it be on an idle fleet; no time to retry is named


class SizeFairness:
    """Bounds refusals by prompt-length quartile: at most `bound` times the average share."""

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.aim = AIM
        self._recent: deque[int] = deque(maxlen=512)
        self._edges: tuple[int, int, int] | None = None
        self._until_sort = 0
        self._refusals = False  # there was one
        self.offered = [0.0] * 4
        self.shed = [0.0] * 4  # for whatever reason
        self.unpriced = [0.0] * 4  # of these, the ones that no price chose

    def quartile(self, prompt_tokens: int) -> int:
        return 0 if self._edges is None else bisect_left(self._edges, prompt_tokens)

    def arrived(self, prompt_tokens: int) -> None:
        self._recent.append(prompt_tokens)
        self._until_sort -= 1
        if self._until_sort <= 0:
            ordered = sorted(self._recent)
            n = len(ordered)
            self._edges = (ordered[n // 4], ordered[n // 2], ordered[(3 * n) // 4])
            self._until_sort = min(32, max(1, n // 4))
        _fade(self.offered)
        if self._refusals:  # else they are zero
            _fade(self.shed)
            _fade(self.unpriced)
        self.offered[self.quartile(prompt_tokens)] += 1.0

    def refused(self, prompt_tokens: int, *, priced: bool = False) -> None:
        quartile = self.quartile(prompt_tokens)
        self._refusals = True
        self.shed[quartile] += 1.0
        if not priced:
            self.unpriced[quartile] += 1.0

    def steer(self) -> None:
        """Called while there is a price: aim higher while the worst quartile is below the bound, lower above it."""
        offered = sum(self.offered, 0.0)
        if self.bound == float("inf") or offered < 1.0:
            return
        worst = max([s / max(o, 1.0) for s, o in zip(self.shed, self.offered, strict=True)])
        below = worst <= REACHED * self.bound * sum(self.shed, 0.0) / offered
        self.aim = min(1.0, max(LEAST_AIM, self.aim * (RAISE if below else LOWER)))

    def excess(self, quartile: int) -> float:
        """Share of a quartile refused beyond the bound, lately; counts what was refused for any reason."""
        offered = sum(self.offered, 0.0)
        if self.bound == float("inf") or offered < 1.0:
            return 0.0
        share = self.shed[quartile] / max(self.offered[quartile], 1.0)
        return share - self.aim * self.bound * sum(self.shed, 0.0) / offered

    def least_share(self, quartile: int, average: float, best: float) -> float:
        """Share of a quartile that a price must leave, given the average share it refuses and the best share it
        leaves: what is refused without being priced counts against the bound too."""
        return self.least_shares(average, best)[quartile]

    def least_shares(self, average: float, best: float) -> list[float]:
        """The same of all four."""
        if self.bound == float("inf"):
            return [0.0] * 4
        average += sum(self.unpriced, 0.0) / max(sum(self.offered, 0.0), 1.0)
        rest = 1.0 - self.aim * self.bound * average
        least = [rest + u / max(o, 1.0) for u, o in zip(self.unpriced, self.offered, strict=True)]
        return [max(share, WORST_TO_BEST * best) for share in least] if average > HEAVY_SHED else least


def _fade(quartiles: list[float]) -> None:
    a, b, c, d = quartiles
    quartiles[:] = (a * MEMORY, b * MEMORY, c * MEMORY, d * MEMORY)


class StickyRefusals:
    """Sessions refused lately: their next turns are refused too while the overload lasts, so that conversations
    survive or fail whole instead of all losing turns (the idea of DAGOR, Zhou et al., SoCC 2018)."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def refuse(self, session: str | None, until: float) -> None:
        if session is None:
            return
        if len(self._until) > 100_000:
            self._until.clear()
        self._until[session] = until

    def refused(self, session: str | None, now: float) -> bool:
        if session is None:
            return False
        until = self._until.get(session)
        if until is None:
            return False
        if now >= until:
            del self._until[session]
            return False
        return True
