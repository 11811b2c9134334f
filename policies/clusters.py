"""What an experiment counted, by arm and by unit, and the differences that can be told from it.

Requests of one session, or of one slice of time, share caches and queues: they are not independent, their clusters
are. For each cell (arm, level) and cluster six sums are kept. An arm's rate is R = sum(y) / sum(n); a contrast
sum(c_k R_k) over cells has the linearised variance m / (m-1) x sum_j (sum_k c_k (y_jk - R_k n_jk) / n_k)^2 over
m clusters (Deng, Knoblich and Lu 2018; Cochran 1977, section 6); where hardly any request failed, at least that of as
many independent ones. What is known before an arm acts (the length of the prompt) is taken out by regression over
clusters (CUPED: Deng et al. 2013; Lin 2013).
Trade-off: at most `most` clusters; neighbouring blocks of time are then merged, which is valid and a little wider.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

REQUESTS, GOOD, ERRORS, PACE, PACED, SIZE = range(6)  # columns of a row of sums
COLUMNS = 6
MOST_CLUSTERS = 512
RARE = 5  # failures, below which their spread over clusters says little
Cell: TypeAlias = tuple[int, int]  # arm, level
Row: TypeAlias = list[float]


@dataclass(slots=True, frozen=True)
class Contrast:
    """A difference of rates with its standard error; `clusters` independent units made it."""

    estimate: float
    se: float
    clusters: int
    reduced: float = 0.0  # share of variance taken out by the covariate
    skew: float = 0.0  # of the estimate: third moment of its clusters over the standard error cubed


@dataclass(slots=True)
class Clusters:
    """Rows of sums by cell and cluster. `shift`: clusters were merged 2^shift together."""

    rows: dict[Cell, dict[int, Row]] = field(default_factory=dict)
    shift: int = 0
    most: int = MOST_CLUSTERS

    def add(self, cell: Cell, cluster: int, good: bool, error: bool, pace: float | None, size: float) -> None:
        """One request. pace: TPOT over its objective, None where not applicable; size: what is known before."""
        rows = self.rows.get(cell)
        if rows is None:
            rows = self.rows[cell] = {}
        row = rows.get(cluster >> self.shift)
        if row is None:
            row = rows[cluster >> self.shift] = [0.0] * COLUMNS
            if len(rows) > self.most:
                self._merge()
                row = rows[cluster >> self.shift]
        row[REQUESTS] += 1.0
        row[GOOD] += good
        row[ERRORS] += error
        if pace is not None:
            row[PACE] += pace
            row[PACED] += 1.0
        row[SIZE] += size

    def total(self, arm: int, column: int) -> float:
        """Sum of one column over an arm's levels."""
        return math.fsum(row[column] for (a, _), rows in self.rows.items() if a == arm for row in rows.values())

    def levels(self, arm: int) -> list[int]:
        return sorted(level for a, level in self.rows if a == arm)

    def without_levels(self) -> Clusters:
        """The same with the levels of each arm in one cell."""
        out = Clusters(shift=self.shift, most=self.most)
        for (arm, _), rows in self.rows.items():
            into = out.rows.setdefault((arm, 0), {})
            for cluster, row in rows.items():
                known = into.get(cluster)
                into[cluster] = list(row) if known is None else [x + y for x, y in zip(known, row, strict=True)]
        return out

    def merged(self, other: Clusters) -> Clusters:
        """The sums of two gateways, or of two parts of one."""
        out = Clusters(shift=max(self.shift, other.shift), most=max(self.most, other.most))
        for part in (self, other):
            for cell, rows in part.rows.items():
                into = out.rows.setdefault(cell, {})
                for cluster, row in rows.items():
                    at = cluster >> (out.shift - part.shift)
                    known = into.get(at)
                    into[at] = list(row) if known is None else [x + y for x, y in zip(known, row, strict=True)]
        return out

    def document(self) -> dict[str, Any]:
        """Plain values, as `read` takes them."""
        cells = [[arm, level, [[c, *row] for c, row in rows.items()]] for (arm, level), rows in self.rows.items()]
        return {"shift": self.shift, "cells": cells}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Clusters:
        """Raises KeyError, TypeError or ValueError for what `document` did not write."""
        out = cls(shift=int(document["shift"]))
        for arm, level, rows in document["cells"]:
            made = out.rows[int(arm), int(level)] = {}
            for cluster, *row in rows:
                if len(row) != COLUMNS:
                    raise ValueError(f"a row of {len(row)} sums; {COLUMNS} would be right")
                made[int(cluster)] = [float(x) for x in row]
        return out

    def _merge(self) -> None:
        self.shift += 1
        for cell, rows in self.rows.items():
            halved: dict[int, Row] = {}
            for cluster, row in rows.items():
                known = halved.get(cluster >> 1)
                halved[cluster >> 1] = row if known is None else [x + y for x, y in zip(known, row, strict=True)]
            rows.clear()
            rows.update(halved)
            self.rows[cell] = rows


def contrast(
    clusters: Clusters, coefficients: Mapping[Cell, float], top: int = GOOD, bottom: int = REQUESTS, adjust: bool = True
) -> Contrast | None:
    """sum(c_k R_k) over cells, R = sum of column `top` over sum of column `bottom`. None where a cell has nothing,
    or with fewer than 3 clusters. adjust: take out what SIZE explains, where c sums to zero."""
    tables = [(clusters.rows.get(cell, {}), c) for cell, c in coefficients.items() if c]
    estimate = floor = 0.0
    rare = False  # whether some cell has hardly any of one kind
    parts = []
    for rows, c in tables:
        n = math.fsum(row[bottom] for row in rows.values())
        if n <= 0.0:
            return None
        hits = math.fsum(row[top] for row in rows.values())
        rate = hits / n
        estimate += c * rate
        share = (hits + 2.0) / (n + 4.0)  # Agresti and Caffo 2000
        rare |= min(hits, n - hits) < RARE
        floor += c * c * share * (1.0 - share) / n
        parts.append((rows, c / n, rate))
    residuals = _residuals(parts, top, bottom)
    m = len(residuals)
    if m < 3:
        return None
    scale = m / (m - 1)
    variance = scale * math.fsum(e * e for e in residuals.values())
    if rare and top in (GOOD, ERRORS) and variance < floor:  # that none failed is no proof that none ever will
        return Contrast(estimate, math.sqrt(floor), m)
    plain = Contrast(estimate, math.sqrt(variance), m, skew=_skew(residuals.values()))
    if not adjust or abs(math.fsum(c for _, c in tables)) > 1e-9 or bottom != REQUESTS:
        return plain
    moved = 0.0
    sized = []
    for rows, c in tables:
        n = math.fsum(row[REQUESTS] for row in rows.values())
        mean = math.fsum(row[SIZE] for row in rows.values()) / n
        moved += c * mean
        sized.append((rows, c / n, mean))
    known = _residuals(sized, SIZE, REQUESTS)
    spread = math.fsum(x * x for x in known.values())
    if spread <= 0.0 or m < 8:
        return plain
    slope = math.fsum(e * known[j] for j, e in residuals.items()) / spread
    rest = [e - slope * known[j] for j, e in residuals.items()]
    left = m / (m - 2) * math.fsum(e * e for e in rest)
    if left >= variance:
        return plain
    return Contrast(estimate - slope * moved, math.sqrt(left), m, 1.0 - left / variance, _skew(rest))


def _skew(residuals: Collection[float]) -> float:
    """Between -1 and 1, the ends where one cluster makes the whole spread."""
    square = math.fsum(e * e for e in residuals)
    return math.fsum(e**3 for e in residuals) / square**1.5 if square > 0.0 else 0.0


def _residuals(parts: Sequence[tuple[Mapping[int, Row], float, float]], top: int, bottom: int) -> dict[int, float]:
    """By cluster: what it adds to the contrast beyond the mean."""
    out: dict[int, float] = {}
    for rows, weight, rate in parts:
        for cluster, row in rows.items():
            out[cluster] = out.get(cluster, 0.0) + weight * (row[top] - rate * row[bottom])
    return out


def difference(arm: int, levels: Iterable[int] = (0,), against: int = 0) -> dict[Cell, float]:
    """Coefficients of an arm minus another one, each level weighing the same."""
    listed = list(levels)
    share = 1.0 / len(listed)
    return {(arm, level): share for level in listed} | {(against, level): -share for level in listed}
