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
from collections.abc import Mapping, Set
from typing import Any, Final

from policies.admission import SizeFairness
from policies.price import Price

TOLD_S: Final = 1.0
MOST: Final = 64  # rows of a kind
Row = tuple[Any, ...]  # at, its number, and what there is to say


class Told:
    """`said` is what others should `hear`. Costs nothing until somebody asks for it."""

    def __init__(self, price: Price, fairness: SizeFairness) -> None:
        self.shares = False
        self.waiting_s: dict[str, float] = {}  # prefill seconds that each other gateway holds; empty: none is heard
        self._price, self._fairness = price, fairness
        self._asked: deque[Row] = deque()
        self._refused: deque[Row] = deque()
        self._numbers = [0, 0, 0, 0]  # arrivals, refusals, late ones, dispatches since the start
        self._heard: dict[str, list[int]] = {}  # the same of each other gateway, up to where it was heard

    def asked(self, now: float, prompt_tokens: int, tokens: float, tenant: str | None, context: float = 0.0) -> None:
        """As the price is asked."""
        if self.shares:
            self._numbers[0] += 1
            self._note(self._asked, (now, self._numbers[0], prompt_tokens, round(tokens, 2), tenant, round(context)))

    def refused(self, now: float, prompt_tokens: int, priced: bool, late: bool) -> None:
        if self.shares:
            self._numbers[1] += 1
            self._numbers[2] += late
            self._note(self._refused, (now, self._numbers[1], prompt_tokens, priced))

    def dispatched(self) -> None:
        self._numbers[3] += 1

    def said(self, waiting_s: float) -> dict[str, Any]:
        """Plain values. waiting_s: prefill seconds of what is held here."""
        self.shares = True
        return {
            "asked": _part(self._asked),
            "refused": _part(self._refused),
            "numbers": list(self._numbers),
            "waiting": round(waiting_s, 3),
        }

    def heard(self, gateway: str, said: Mapping[str, Any], now: float) -> None:
        """What another gateway said, which may say again what it said before."""
        numbers = said["numbers"]
        last = self._heard.get(gateway)
        if last is None or any(new < old for new, old in zip(numbers, last, strict=True)):  # it is new, or started anew
            last = numbers
        self._heard[gateway], self.waiting_s[gateway] = numbers, said["waiting"]
        every, rows = said["asked"]
        for number, prompt_tokens, tokens, tenant, context in rows:
            for _ in range(every if number > last[0] else 0):
                self._fairness.arrived(prompt_tokens)
                self._price.asked_elsewhere(prompt_tokens, tokens, tenant, now, context)
        every, rows = said["refused"]
        for number, prompt_tokens, priced in rows:
            for _ in range(every if number > last[1] else 0):
                self._fairness.refused(prompt_tokens, priced=priced)
        self._price.turned_elsewhere(numbers[2] - last[2], numbers[3] - last[3])

    def forget(self, present: Set[str]) -> None:
        """All but these gateways are gone."""
        for gateway in self._heard.keys() - present:
            del self._heard[gateway], self.waiting_s[gateway]

    def _note(self, rows: deque[Row], row: Row) -> None:
        rows.append(row)
        while rows[0][0] < row[0] - TOLD_S:
            rows.popleft()


def _part(rows: deque[Row]) -> tuple[int, list[tuple[Any, ...]]]:
    """How many each stands for, and every so manieth."""
    every = 1 + len(rows) // MOST
    return every, [row[1:] for row in rows if row[1] % every == 0]
