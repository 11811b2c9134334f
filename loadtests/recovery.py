"""How long a fleet needs to be itself again after a burst or another disturbance.

Recovered: the first time after the disturbance's end from which every 10 s bin (by scheduled time) keeps the target
attainment for 30 s and the mean number of open requests in it is back under its p95 from before. Beside it: failed
requests of the disturbance and of the time until recovery, and the goodput missed against the rate before. A run that
never recovers is censored at its end, and says so. Bins without requests neither help nor hurt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from loadtests.record import Record
from loadtests.schedule import Row, Schedule, ScheduleError
from loadtests.source import number
from policies.objectives import Partition
from policies.statistics import quantile

BIN_S = 10.0
HOLD_S = 30.0


@dataclass(slots=True, frozen=True)
class Burst:
    """`factor` times the load from `at_s` for `lasts_s`."""

    factor: float
    at_s: float
    lasts_s: float

    @classmethod
    def parse(cls, text: str) -> Burst:
        """`3x@60+20`: three times the load from 60 s for 20 s. Raises ScheduleError."""
        try:
            factor, _, times = text.partition("x@")
            at, _, lasts = times.partition("+")
            burst = cls(float(factor), float(at), float(lasts))
        except ValueError:
            raise ScheduleError(f"--burst {text!r}: like 3x@60+20 (factor x@ start + length) would be right") from None
        if burst.factor <= 1.0 or burst.at_s <= 0.0 or burst.lasts_s <= 0.0:
            raise ScheduleError(f"--burst {text!r}: a factor above 1, a start and a length above 0 would be right")
        return burst

    def over(self, base: Schedule, extra: Schedule) -> Schedule:
        """The base schedule with the rows that `extra` (cut at factor - 1 times the load) has in the burst."""
        added = [
            replace(row, session=None if row.session is None else f"burst-{row.session}")
            for row in extra.rows
            if self.at_s <= extra.start_s(row) < self.at_s + self.lasts_s
        ]
        rows: list[Row] = [*base.rows, *added]
        notes = (*base.recipe.notes, f"burst {self.factor:g}x from {self.at_s:g} s for {self.lasts_s:g} s")
        return replace(base, rows=number(rows), recipe=replace(base.recipe, notes=notes))


@dataclass(slots=True, frozen=True)
class Recovery:
    recovered_after_s: float | None  # from the end of the disturbance; None: never within the run
    censored_at_s: float
    failed_requests: int
    missed_good_requests: float
    offered_after: tuple[int, ...]  # in each 10 s bin from the end on
    good_after: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def recovery(records: Sequence[Record], start_s: float, end_s: float, window_s: float, target: float) -> Recovery:
    """From the records of one run whose disturbance lasted from `start_s` to `end_s`."""
    bins = int(window_s // BIN_S)
    offered, good = [0] * bins, [0] * bins
    for record in records:
        if record.counted and record.scheduled_s is not None and 0.0 <= record.scheduled_s < bins * BIN_S:
            at = int(record.scheduled_s // BIN_S)
            offered[at] += 1
            good[at] += record.partition is Partition.GOOD
    before = range(int(start_s // BIN_S))
    calm = [open_at(records, float(at)) for at in range(int(start_s))]
    ceiling = max(1.0, quantile(sorted(calm), 0.95) if calm else 0.0)
    hold = int(HOLD_S // BIN_S)
    first = -int(-end_s // BIN_S)
    recovered = None
    for i in range(first, bins - hold + 1):
        held = all(offered[j] == 0 or good[j] / offered[j] >= target for j in range(i, i + hold))
        if held and _mean_open(records, i * BIN_S) <= ceiling:
            recovered = i
            break
    until = bins if recovered is None else recovered
    disturbed = range(int(start_s // BIN_S), until)
    rate = sum(good[i] for i in before) / len(before) if len(before) else 0.0
    return Recovery(
        None if recovered is None else recovered * BIN_S - end_s,
        bins * BIN_S - end_s,
        sum(offered[i] - good[i] for i in disturbed),
        sum(max(0.0, rate - good[i]) for i in disturbed),
        tuple(offered[first : first + hold]),
        tuple(good[first : first + hold]),
    )


def open_at(records: Sequence[Record], at_s: float) -> int:
    """Requests that were scheduled and had not ended."""
    return sum(
        r.scheduled_s is not None and r.scheduled_s <= at_s and (r.end_s is None or r.end_s > at_s) for r in records
    )


def _mean_open(records: Sequence[Record], from_s: float) -> float:
    samples = [open_at(records, from_s + i) for i in range(int(BIN_S))]
    return sum(samples) / len(samples)


def settled(records: Sequence[Record], window_s: float) -> bool:
    """Whether the work open in the last tenth of the window is at most twice its mean in the window."""
    samples = [open_at(records, window_s * (i + 0.5) / 50) for i in range(50)]
    mean, last = sum(samples) / 50, sum(samples[-5:]) / 5
    return last <= max(2.0 * mean, 4.0)
