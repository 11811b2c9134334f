"""Which requests are not worth starting: infeasible ones at once, and under overload the fewest that free the rest.

Latest start = deadline - margin x predicted service. Past it a request cannot meet its objective anywhere and is
refused there and then, not after timing out. When the held requests together cannot all be met, EDF alone lets
every one become late in turn; so walk them in EDF order and, whenever the next would be late, drop the one with most
work per unit of weight so far (Moore 1968 / Hodgson: fewest late jobs on one machine, here the pooled fleet).
That sheds long prompts first; `SizeFairness` bounds how much. Trade-off: the pooled walk is optimistic about placement,
so it drops too few rather than too many; the latest start catches the others.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from policies.tracked import Tracked

MEMORY = 0.998  # per arrival: about 500 requests
SLACK_REQUESTS = 2.0  # refusals a quartile may be ahead of its bound: counts are whole numbers
HEAVY_SHED = 0.4  # average shed share above which the second bound holds
WORST_TO_BEST = 0.3  # attainment of the worst quartile against the best, above HEAVY_SHED


class SizeFairness:
    """Bounds refusals by prompt-length quartile: at most `bound` times the average share."""

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self._recent: deque[int] = deque(maxlen=512)
        self._edges: tuple[int, int, int] | None = None
        self._until_sort = 0
        self.offered = [0.0] * 4
        self.shed = [0.0] * 4

    def quartile(self, prompt_tokens: int) -> int:
        if self._edges is None:
            return 0
        return sum(prompt_tokens > edge for edge in self._edges)

    def arrived(self, prompt_tokens: int) -> None:
        self._recent.append(prompt_tokens)
        self._until_sort -= 1
        if self._until_sort <= 0:
            ordered = sorted(self._recent)
            n = len(ordered)
            self._edges = (ordered[n // 4], ordered[n // 2], ordered[(3 * n) // 4])
            self._until_sort = 32
        for i in range(4):
            self.offered[i] *= MEMORY
            self.shed[i] *= MEMORY
        self.offered[self.quartile(prompt_tokens)] += 1.0

    def refused(self, prompt_tokens: int) -> None:
        self.shed[self.quartile(prompt_tokens)] += 1.0

    def may_refuse(self, prompt_tokens: int, more: Iterable[int] = ()) -> bool:
        """Whether refusing this one, after `more` (prompt tokens of others about to be refused), keeps the bound."""
        if self.bound == float("inf") or self._edges is None:
            return True
        shed = list(self.shed)
        for tokens in more:
            shed[self.quartile(tokens)] += 1.0
        at = self.quartile(prompt_tokens)
        shed[at] += 1.0
        offered = [max(x, 1.0) for x in self.offered]
        average = sum(shed) / sum(offered)
        share = max(0.0, shed[at] - SLACK_REQUESTS) / offered[at]
        if share > self.bound * average:
            return False
        if average > HEAVY_SHED:
            best = max(1.0 - s / o for s, o in zip(shed, offered, strict=True))
            return 1.0 - share >= (WORST_TO_BEST + 0.05) * best
        return True


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


def surplus(
    held: Iterable[Tracked], now: float, capacity: float, busy_s: float, fairness: SizeFairness, overhead_s: float
) -> list[Tracked]:
    """Held requests to drop so that the rest can be on time: Moore-Hodgson over a pooled machine.

    capacity: prefill seconds served per second by the whole pool; busy_s: prefill seconds already ahead of them.
    Requests without a deadline, or that may not be shed, take capacity and are never dropped.
    """
    ordered = sorted((t for t in held), key=lambda t: (t.due, t.seq))
    kept: list[tuple[float, int, Tracked]] = []  # heap, most work per weight first
    work = busy_s
    dropped: list[Tracked] = []
    gone: list[int] = []
    for tracked in ordered:
        work += tracked.service_s
        if tracked.service_class.sheddable and tracked.request.ttft_deadline is not None:
            heapq.heappush(kept, (-tracked.service_s / max(tracked.service_class.weight, 1e-3), -tracked.seq, tracked))
        while kept and now + work / capacity + overhead_s > tracked.due:
            spared: list[tuple[float, int, Tracked]] = []
            victim: Tracked | None = None
            while kept:
                entry = heapq.heappop(kept)
                if fairness.may_refuse(entry[2].request.prompt_tokens, gone):
                    victim = entry[2]
                    break
                spared.append(entry)
                if len(spared) >= 64:
                    break
            if victim is None and spared:
                victim = spared.pop(0)[2]  # every size is at its bound: the most work goes
            for entry in spared:
                heapq.heappush(kept, entry)
            if victim is None:
                break
            work -= victim.service_s
            dropped.append(victim)
            gone.append(victim.request.prompt_tokens)
    return dropped
