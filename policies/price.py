"""What a request may cost at most while the fleet is overloaded.

When more prefill seconds are offered than the fleet can serve, the count of good requests is highest if the cheapest
are served and the rest are refused at arrival (the fractional knapsack; Moore-Hodgson for a stream). Twice a second
the arrivals of the last half minute are sorted by cost (prefill seconds / weight) and a threshold is found per
prompt-length quartile: one common price, raised where `SizeFairness` asks for more of a quartile, so that within it the
cheapest are taken. Arrivals are kept in tokens and all priced with the present fit, or prompts all alike would look
dearer than those of the window whenever a fit moves, and all be refused; where they really got dearer (a lost cache),
of the last seconds' arrivals the share that capacity admits is served whatever it costs. The capacity is learnt: it
starts from the paces, falls when feasible requests had to be refused late, rises when there was room. Tenants within
their fair share pay none (max-min). Nothing is asked unless somebody is held for long: a closed loop asks for just
what it is served. Trade-off: a burst shorter than the window is left to the queue.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Final, TypeAlias

from policies.admission import SizeFairness

WINDOW_S: Final = 30.0
LEAST_ARRIVALS: Final = 32
EVERY_S: Final = 0.5
# what waits and what came in this time fits into it: the overload is over, whatever the window remembers
RECENT_S: Final = 5.0
LONG: Final = 0.25  # of the time for which a request could be held: who was for more shows that there is too much to do
TARGET_LATE: Final = 0.03  # late refusals per dispatch at which the capacity is right
STEP: Final = 0.02
HEADROOM: Final = 0.75  # of the capacity is filled by those who pay while others do not: theirs is the shorter queue
TOLERANCE: Final = 1.5  # times an equal share a tenant may ask for without paying: half a minute holds few long prompts
AT_FIRST: Final = 0.85  # factor on the capacity the paces give
LOWEST: Final = 0.4
HIGHEST: Final = 1.1
UNBELIEVED: Final = 2.0  # the same while a price is asked and hardly anybody is late: the paces or speeds are wrong
FREE: Final = float("inf")
ALIKE: Final = 1.05  # times as dear: no reason to serve the one and refuse the other
SPARE: Final = 4.0  # requests: so many served beyond the least share are set against it, no more
MOST_DROPPED: Final = 1_000  # arrivals that are past, before their places are given back
MOST_SORTED: Final = 1_000  # arrivals
Tariff: TypeAlias = tuple[float, float]  # seconds per token and per token times context: b and c of `predictor.py`
# at, uncached tokens / weight, their context / weight, prompt tokens, tenant, whether here
Arrival: TypeAlias = tuple[float, float, float, int, str | None, bool]

Priced: TypeAlias = tuple[float, float, int, str | None]  # at, cost in seconds, prompt tokens, tenant


class Price:
    """Thresholds in seconds per unit of weight, by quartile."""

    def __init__(self, fairness: SizeFairness) -> None:
        self.fairness = fairness
        self.factor = AT_FIRST
        self.thresholds = [FREE] * 4
        self._shares = [1.0] * 4  # of the arrivals that cost about the threshold, to be served
        self._owed = [0.0] * 4  # how much of one of these is
        self._least = 0.0  # share of those who pay that capacity has room for, whatever they cost
        self._behind = 0.0  # how many of them less than that were served
        self.exempt: frozenset[str | None] = frozenset()  # tenants within their fair share
        self.excess_s = 0.0  # that the fleet would need for what was too much in the window
        self.tariff: Tariff = (1.0, 0.0)
        self._arrivals: list[Arrival] = []
        self._first = 0  # of the window; those before it are dropped now and then
        self._asked = [0.0, 0.0]  # tokens and context of all of them, summed
        self._here = [0.0, 0.0]  # of those that did not come to another gateway
        self._set_at = self._strained_at = float("-inf")

    @property
    def active(self) -> bool:
        return min(self.thresholds) < FREE

    def due(self, now: float) -> bool:
        """Whether the thresholds should be set again before the next question."""
        return now - self._set_at >= EVERY_S

    def too_dear(self, prompt_tokens: int, tokens: float, tenant: str | None, now: float, context: float = 0.0) -> bool:
        """At arrival. tokens, context: u and u (h + u/2) of its prefill, both / weight."""
        self._pass_to(now)  # little each time, and not all at once where many wait for it
        self._arrivals.append((now, tokens, context, prompt_tokens, tenant, True))
        self._here[0] += tokens
        self._here[1] += context
        self._asked[0] += tokens
        self._asked[1] += context
        cost = self._cost(tokens, context)
        quartile = self.fairness.quartile(prompt_tokens)
        threshold = self.thresholds[quartile]
        if tenant in self.exempt:
            return False
        self._behind += self._least
        if cost <= threshold * ALIKE and cost * ALIKE > threshold:
            self._owed[quartile] += self._shares[quartile]
            served = self._owed[quartile] >= 1.0
            if served:
                self._owed[quartile] -= 1.0
        else:
            served = cost <= threshold
        if not served and self._behind < 1.0:
            return True
        self._behind = max(-SPARE, self._behind - 1.0)
        return False

    def asked_elsewhere(
        self, prompt_tokens: int, tokens: float, tenant: str | None, now: float, context: float = 0.0
    ) -> None:
        """It came to another gateway of the fleet."""
        self._arrivals.append((now, tokens, context, prompt_tokens, tenant, False))
        self._asked[0] += tokens
        self._asked[1] += context

    def turned_elsewhere(self, late: int, dispatched: int) -> None:
        """So many other gateways refused late and dispatched: one capacity is learnt by all."""
        self.factor = max(LOWEST, self.factor * (1.0 - STEP) ** late)
        self.dispatched(dispatched)

    def floods(self, tenant: str | None) -> bool:
        """Whether others are within their share of an overloaded fleet, and this tenant asks for more than its own."""
        return bool(self.exempt) and tenant not in self.exempt

    def demand(self, now: float) -> float:
        """Seconds per second that arrivals here asked for in the window."""
        self._pass_to(now)
        return self._cost(*self._here) / self._span_s(now)

    def held(self, since: float, until: float, now: float) -> bool:
        """Somebody who could be held until then is held no more; answers whether that was for long."""
        long = now - since > LONG * (until - since)
        if long:
            self.strain(now)
        return long

    def strain(self, now: float) -> None:
        """Somebody was held for long, here or elsewhere."""
        self._strained_at = now

    def strained(self, wait_s: float, most_s: float, now: float) -> bool:
        """Whether anybody was lately, or will be: what is held takes `wait_s`, and a request may be for `most_s`."""
        return now - self._strained_at <= RECENT_S or wait_s > LONG * max(0.0, most_s)

    def refused_late(self) -> None:
        self.factor = max(LOWEST, self.factor * (1.0 - STEP))

    def dispatched(self, requests: int = 1) -> None:
        highest = UNBELIEVED if self.active else HIGHEST
        if self.factor < highest:
            self.factor = min(highest, self.factor * (1.0 + STEP * TARGET_LATE) ** requests)

    def set(
        self,
        capacity: float,
        now: float,
        waiting_s: float = float("inf"),
        tariff: Tariff | None = None,
        strained: bool = True,
    ) -> None:
        """New thresholds from the arrivals of the window. capacity: prefill seconds per second of the fleet;
        waiting_s: prefill seconds of what is held, where that is known; tariff: if it is another by now; strained:
        whether anybody has to wait for long."""
        self._set_at = now
        self._pass_to(now)
        if tariff is not None:
            self.tariff = tariff
        asked_s = self._cost(*self._asked)
        count, span = len(self._arrivals) - self._first, self._span_s(now)
        budget = self.factor * capacity * span
        self.excess_s = max(0.0, asked_s - budget) / max(self.factor * capacity, 1e-3)
        if not strained or count < LEAST_ARRIVALS or asked_s <= budget:
            self._ask_nothing()
            return
        every = 1  # of thousands of arrivals a part says the same, and all of them would take 20 ms
        if count > MOST_SORTED:
            every += 2 * count // MOST_SORTED
        per_token, per_context = self.tariff
        arrivals = [
            (at, per_token * tokens + per_context * context, prompt_tokens, tenant)
            for at, tokens, context, prompt_tokens, tenant, _ in self._arrivals[self._first :: every]
        ]
        if _recent(arrivals, now) * every <= self.factor * capacity * RECENT_S - waiting_s:
            self._ask_nothing()
            return
        self.fairness.steer()
        budget /= every
        excused = self._excuse(arrivals, capacity * span / every)
        if self.exempt:
            budget = max(0.1 * budget, HEADROOM * budget - excused)
        costs: list[list[float]] = [[], [], [], []]
        recent_s, exempt, quartile_of = 0.0, self.exempt, self.fairness.quartile
        for at, cost, prompt_tokens, tenant in arrivals:
            if tenant not in exempt:
                costs[quartile_of(prompt_tokens)].append(cost)
                if at >= now - RECENT_S:
                    recent_s += cost
        if not any(costs):  # every tenant asks for its share or less: nobody is to be charged
            self.thresholds, self._least = [FREE] * 4, 0.0
            return
        held_s = waiting_s / every if waiting_s < FREE else 0.0
        room_s = budget * min(1.0, RECENT_S / span) - held_s
        self._least = min(1.0, max(0.0, room_s) / recent_s) if recent_s > 0.0 else 1.0
        for quartile in costs:
            quartile.sort()
        up_to = [list(accumulate(q, initial=0.0)) for q in costs]  # cost of the k cheapest
        owed = [max(0.0, 2.0 * self.fairness.excess(i)) for i in range(4)]
        prices = sorted(chain.from_iterable(costs))
        low, high = -1, len(prices)  # places in it: of the highest price whose cost is within the budget, and above
        kept = most = self._kept(costs, owed, 0.0)
        spent = over = self._spent(up_to, kept)
        while high - low > 1:
            middle = (low + high) // 2
            tried = self._kept(costs, owed, prices[middle])
            if (spends := self._spent(up_to, tried)) > budget:
                high, most, over = middle, tried, spends
            else:
                low, kept, spent = middle, tried, spends
        part = min(1.0, max(0.0, budget - spent) / (over - spent)) if over > spent else 0.0
        for i, q in enumerate(costs):
            self._choose(i, q, kept[i] + part * max(0, most[i] - kept[i]))

    def _ask_nothing(self) -> None:
        self.thresholds, self.exempt, self.excess_s = [FREE] * 4, frozenset(), 0.0
        self._least = 0.0

    def _choose(self, quartile: int, costs: list[float], served: float) -> None:
        """The threshold so that `served` of these, cheapest first, are below it, and the share of those about as dear.
        Of prompts that are all alike it is a share, or all would be refused, and nothing would be learnt any more."""
        if served >= len(costs):
            self.thresholds[quartile], self._shares[quartile] = FREE, 1.0
            return
        threshold = self.thresholds[quartile] = costs[int(served)]
        below, alike = bisect_left(costs, threshold / ALIKE), bisect_right(costs, threshold * ALIKE)
        self._shares[quartile] = min(1.0, max(0.0, (served - below) / (alike - below)))

    @staticmethod
    def _spent(up_to: list[list[float]], kept: list[int]) -> float:
        """Seconds that the cheapest of each quartile ask for."""
        return sum([sums[k] for sums, k in zip(up_to, kept, strict=True)], 0.0)

    def _cost(self, tokens: float, context: float) -> float:
        """Seconds."""
        return self.tariff[0] * tokens + self.tariff[1] * context

    def _pass_to(self, now: float) -> None:
        """Forgets what is older than the window."""
        arrivals, first, oldest = self._arrivals, self._first, now - WINDOW_S
        asked_tokens = asked_context = here_tokens = here_context = 0.0
        while first < len(arrivals):
            at, tokens, context, _, _, here = arrivals[first]
            if at >= oldest:
                break
            asked_tokens += tokens
            asked_context += context
            if here:
                here_tokens += tokens
                here_context += context
            first += 1
        if first == self._first:
            return
        if first == len(arrivals):  # exactly zero: sums of floats drift
            self._asked, self._here = [0.0, 0.0], [0.0, 0.0]
        else:
            self._asked = [self._asked[0] - asked_tokens, self._asked[1] - asked_context]
            self._here = [self._here[0] - here_tokens, self._here[1] - here_context]
        if first > MOST_DROPPED or 2 * first > len(arrivals):
            del arrivals[:first]
            first = 0
        self._first = first

    def _span_s(self, now: float) -> float:
        """Age of the oldest in the window, a second at least."""
        return max(now - self._arrivals[self._first][0], 1.0) if self._first < len(self._arrivals) else 1.0

    def _excuse(self, arrivals: Sequence[Priced], budget: float) -> float:
        """Tenants that ask for about an equal share or less are exempt; answers the seconds they ask for."""
        if len({arrival[3] for arrival in arrivals}) < 2:
            self.exempt = frozenset()
            return 0.0
        demand: dict[str | None, float] = {}
        for _, cost, _, tenant in arrivals:
            demand[tenant] = demand.get(tenant, 0.0) + cost
        modest, excused, left = set(), 0.0, len(demand)
        for tenant in sorted(demand, key=lambda t: demand[t]):
            if demand[tenant] * left > TOLERANCE * (budget - excused):
                break
            modest.add(tenant)
            excused += demand[tenant]
            left -= 1
        self.exempt = frozenset(modest)
        return excused

    def _kept(self, costs: list[list[float]], owed: list[float], price: float) -> list[int]:
        """How many of each quartile are served at this price, fairness applied; owed: shares added to what is due."""
        kept = [bisect_right(q, price) for q in costs]
        total = sum([len(q) for q in costs], 0)
        for _ in range(4):  # each round raises the shares below their bound; four quartiles settle in four
            average, before = 1.0 - sum(kept, 0) / total, kept.copy()
            best = max([k / len(q) for q, k in zip(costs, kept, strict=True) if q])
            for i, share in enumerate(self.fairness.least_shares(average, best)):
                count = len(costs[i])
                kept[i] = min(count, max(kept[i], round(count * (share + owed[i]))))
            if kept == before:
                break
        return kept


def _recent(arrivals: Sequence[Priced], now: float) -> float:
    """What the arrivals of the last few seconds ask for within as much time: one prompt fills one replica, so one of
    half a minute is no overload while the others idle."""
    asked = 0.0
    for at, cost, _, _ in reversed(arrivals):
        if at < now - RECENT_S:
            break
        asked += min(cost, RECENT_S)
    return asked
