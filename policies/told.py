"""What the gateways of one fleet tell each other of their overload, so that all of them ask the same price.

Each alone sees a part of the arrivals, few of them long: with two gateways at three times the rate of a trace, one
refused prompts of a quarter of a second while the other took all of five. So each tells the arrivals and refusals of
the last second and how often it refused late and dispatched since its start; the others count them like their own,
against the capacity of the whole fleet.
Rows are numbered, since what is told overlaps. Of more than `MOST` rows a part is told, and counted that many times.
Trade-off: what one refused is known to the others a tenth of a second later; a dead gateway's arrivals stay for the
half minute of the window, and its clients mostly come to the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

from policies.admission import SizeFairness
from policies.prices import Prices

TOLD_S: Final = 1.0
MOST: Final = 64  # rows of a kind
Row = tuple[Any, ...]  # at, its number, and what there is to say


class Told:
    """`said` is what others should `hear`. Costs nothing until somebody asks for it."""

    def __init__(self, prices: Prices, fairness: SizeFairness) -> None:
        self.shares = False
        # prefill seconds that each other gateway holds, by group of replicas; empty: none is heard
        self.waiting_s: dict[str, Mapping[str, float]] = {}
        self._prices, self._fairness = prices, fairness
        self._asked: deque[Row] = deque()
        self._refused: deque[Row] = deque()
        self._numbers = [0, 0]  # arrivals and refusals since the start
        self._turned: dict[str, list[int]] = {}  # late ones and dispatches since the start, by group
        self._long: dict[str, int] = {}  # dispatches of what was held for long
        # the same of each other gateway, up to where it was heard
        self._heard: dict[str, tuple[Sequence[int], Mapping[str, Sequence[int]]]] = {}
        self._heard_long: dict[str, Mapping[str, int]] = {}

    def asked(
        self, now: float, group: str, prompt_tokens: int, tokens: float, tenant: str | None, context: float = 0.0
    ) -> None:
        """As the price is asked."""
        if self.shares:
            self._numbers[0] += 1
            self._note(
                self._asked, (now, self._numbers[0], group, prompt_tokens, round(tokens, 2), tenant, round(context))
            )

    def refused(self, now: float, group: str, prompt_tokens: int, priced: bool, late: bool) -> None:
        if self.shares:
            self._numbers[1] += 1
            if late:
                self._of(group)[0] += 1
            self._note(self._refused, (now, self._numbers[1], prompt_tokens, priced))

    def dispatched(self, group: str, held_long: bool = False) -> None:
        self._of(group)[1] += 1
        if held_long:
            self._long[group] = self._long.get(group, 0) + 1

    def waiting(self, group: str) -> float:
        """Prefill seconds that others hold for these replicas."""
        return sum([held.get(group, 0.0) for held in self.waiting_s.values()], 0.0)

    def said(self, waiting_s: Mapping[str, float]) -> dict[str, Any]:
        """Plain values. waiting_s: prefill seconds of what is held here, by group."""
        self.shares = True
        return {
            "asked": _part(self._asked),
            "refused": _part(self._refused),
            "numbers": list(self._numbers),
            "turned": {group: list(counts) for group, counts in self._turned.items()},
            "long": dict(self._long),
            "waiting": {group: round(seconds, 3) for group, seconds in waiting_s.items()},
        }

    def heard(self, gateway: str, said: Mapping[str, Any], now: float) -> None:
        """What another gateway said, which may say again what it said before."""
        numbers, turned = said["numbers"], said["turned"]
        last, turned_then = self._heard.get(gateway, (numbers, turned))
        if any(new < old for new, old in zip(numbers, last, strict=True)) or _fewer(turned, turned_then):
            last, turned_then = numbers, turned  # it started anew
        self._heard[gateway], self.waiting_s[gateway] = (numbers, turned), said["waiting"]
        every, rows = said["asked"]
        for number, group, prompt_tokens, tokens, tenant, context in rows:
            for _ in range(every if number > last[0] else 0):
                self._fairness.arrived(prompt_tokens)
                self._prices.of(group).asked_elsewhere(prompt_tokens, tokens, tenant, now, context)
        every, rows = said["refused"]
        for number, prompt_tokens, priced in rows:
            for _ in range(every if number > last[1] else 0):
                self._fairness.refused(prompt_tokens, priced=priced)
        long: Mapping[str, int] | None = said.get("long")  # older ones do not tell: there anybody may have been
        long_then = self._heard_long.get(gateway, long) or {}
        self._heard_long[gateway] = long or {}
        for group, (late, dispatched) in turned.items():
            then, price = turned_then.get(group, (0, 0)), self._prices.of(group)
            price.turned_elsewhere(late - then[0], dispatched - then[1])
            if late > then[0] or long is None or long.get(group) != long_then.get(group):
                price.strain(now)

    def forget(self, present: Set[str]) -> None:
        """All but these gateways are gone."""
        for gateway in self._heard.keys() - present:
            del self._heard[gateway], self.waiting_s[gateway], self._heard_long[gateway]

    def _of(self, group: str) -> list[int]:
        found = self._turned.get(group)
        if found is None:
            found = self._turned[group] = [0, 0]
        return found

    def _note(self, rows: deque[Row], row: Row) -> None:
        rows.append(row)
        while rows[0][0] < row[0] - TOLD_S:
            rows.popleft()


def _fewer(now: Mapping[str, Sequence[int]], then: Mapping[str, Sequence[int]]) -> bool:
    """Whether it counts less than it did."""
    for group, counts in then.items():
        new = now.get(group, (0, 0))
        if new[0] < counts[0] or new[1] < counts[1]:
            return True
    return False


def _part(rows: deque[Row]) -> tuple[int, list[tuple[Any, ...]]]:
    """How many each stands for, and every so manieth."""
    every = 1 + len(rows) // MOST
    return every, [row[1:] for row in rows if row[1] % every == 0]
