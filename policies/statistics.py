"""How rates are compared: percentiles with their populations, intervals over blocks, goodput arithmetic.

One definition for gateway and load tests. The unit of resampling is the block (one seed of the schedule), never
the request: rows of one burst share a queue. Percentiles are never averaged over runs. Intervals: percentile
bootstrap of the mean of paired differences (Efron and Tibshirani 1993, chapter 13); up to 8 blocks all resamples
are enumerated, so the interval is exact and needs no randomness. Wilson (1927) for shares.
Trade-off: with 5 blocks a bootstrap interval is somewhat too narrow; a Student interval stands beside it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

INFINITE = math.inf
_EXACT_BLOCKS = 8
_RESAMPLES = 10_000


@dataclass(slots=True, frozen=True)
class Percentiles:
    """Of `n` values; None where the population is empty. `max` is the largest."""

    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None
    n: int


@dataclass(slots=True, frozen=True)
class Interval:
    """An estimate with its bounds; `n` blocks or trials, `level` the nominal coverage."""

    estimate: float
    low: float
    high: float
    n: int
    method: str
    level: float = 0.95

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0.0 or self.high < 0.0


@dataclass(slots=True, frozen=True)
class Paired:
    """B against A over the same blocks."""

    difference: Interval  # mean of b - a, bootstrap
    student: Interval  # the same mean, Student t
    log_ratio: Interval | None  # mean of log(b / a); None where a block has zero on a side
    blocks: int

    @property
    def ratio(self) -> tuple[float, float, float] | None:
        """Geometric mean of b / a with its bounds."""
        if self.log_ratio is None:
            return None
        return math.exp(self.log_ratio.estimate), math.exp(self.log_ratio.low), math.exp(self.log_ratio.high)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between closest ranks (Hyndman and Fan 1996, type 7). `ordered` ascends, not empty."""
    if not ordered:
        raise ValueError("quantile of no values; check the population first")
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"q is {q}; a share from 0 to 1 would be right")
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    if ordered[below] == ordered[above]:  # also keeps inf - inf out
        return ordered[below]
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def percentiles(values: Iterable[float]) -> Percentiles:
    """Of the values given; failures are in only if the caller puts them in (as `INFINITE`)."""
    ordered = sorted(values)
    if not ordered:
        return Percentiles(None, None, None, None, None, 0)
    p50, p90, p95, p99 = (quantile(ordered, q) for q in (0.5, 0.9, 0.95, 0.99))
    return Percentiles(p50, p90, p95, p99, ordered[-1], len(ordered))


def goodput_rps(good: int, window_s: float, drain_s: float) -> float:
    """Good requests of the cohort per second of (W + D), both fixed before the run."""
    if window_s <= 0.0 or drain_s < 0.0:
        raise ValueError(f"window {window_s} s and drain {drain_s} s; above 0 and at least 0 would be right")
    return good / (window_s + drain_s)


def attainment(good: int, offered: int) -> float | None:
    """Good share of everything scheduled; None when nothing was."""
    return good / offered if offered else None


def wilson(successes: int, n: int, z: float = 1.959964) -> Interval:
    """Score interval of a share (Wilson 1927); z = 1.96 is 95 %. No trials: the whole range."""
    if not 0 <= successes <= n:
        raise ValueError(f"successes is {successes} of {n}; 0 to {n} would be right")
    if n == 0:
        return Interval(0.0, 0.0, 1.0, 0, "wilson")
    share, z2 = successes / n, z * z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(share, low, high, n, "wilson")


def bootstrap_mean(values: Sequence[float], level: float = 0.95, seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean over blocks; exact up to 8 blocks, 10,000 seeded resamples beyond."""
    n = len(values)
    if n == 0:
        raise ValueError("no blocks; at least 2 would be right")
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, -math.inf, math.inf, 1, "bootstrap", level)
    weighted = _all_resamples(values) if n <= _EXACT_BLOCKS else _some_resamples(values, seed)
    tail = (1 - level) / 2
    return Interval(
        mean, _weighted_quantile(weighted, tail), _weighted_quantile(weighted, 1 - tail), n, "bootstrap", level
    )


def student_mean(values: Sequence[float], level: float = 0.95) -> Interval:
    """Student t interval of the mean over blocks; infinite for one block."""
    n = len(values)
    if n == 0:
        raise ValueError("no blocks; at least 2 would be right")
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, -math.inf, math.inf, 1, "student", level)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = student_quantile(1 - (1 - level) / 2, n - 1) * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, "student", level)


def paired(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Paired:
    """B against A, block by block: position k of both comes from the same seed of the same schedule."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} blocks against {len(b)}; the same blocks in both would be right")
    differences = [y - x for x, y in zip(a, b, strict=True)]
    ratio = None
    if all(x > 0.0 and y > 0.0 for x, y in zip(a, b, strict=True)):
        ratio = bootstrap_mean([math.log(y / x) for x, y in zip(a, b, strict=True)], level)
    return Paired(bootstrap_mean(differences, level), student_mean(differences, level), ratio, len(a))


def noise_floor(first: Sequence[float], second: Sequence[float]) -> float:
    """Largest absolute A/A difference over blocks: what two equal arms showed. Smaller effects mean nothing."""
    if len(first) != len(second) or not first:
        raise ValueError(f"{len(first)} blocks against {len(second)}; equal and at least 1 would be right")
    return max(abs(y - x) for x, y in zip(first, second, strict=True))


def _all_resamples(values: Sequence[float]) -> list[tuple[float, float]]:
    n = len(values)
    total = float(n**n)
    out = []
    for picked in combinations_with_replacement(range(n), n):
        ways = math.factorial(n)
        for i in set(picked):
            ways //= math.factorial(picked.count(i))
        out.append((math.fsum(values[i] for i in picked) / n, ways / total))
    out.sort()
    return out


def _some_resamples(values: Sequence[float], seed: int) -> list[tuple[float, float]]:
    rng, n = random.Random(seed), len(values)
    means = sorted(math.fsum(rng.choices(values, k=n)) / n for _ in range(_RESAMPLES))
    return [(mean, 1.0 / _RESAMPLES) for mean in means]


def _weighted_quantile(weighted: Sequence[tuple[float, float]], q: float) -> float:
    reached = 0.0
    for value, weight in weighted:
        reached += weight
        if reached >= q - 1e-12:
            return value
    return weighted[-1][0]


def student_quantile(p: float, degrees: int) -> float:
    """Quantile of Student's t for p >= 0.5, by bisection of its distribution function."""
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        if _student_cdf(middle, degrees) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_cdf(t: float, degrees: int) -> float:
    """For t >= 0; closed forms for whole degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(degrees))
    cos2 = math.cos(theta) ** 2
    total, term = 0.0, 1.0
    if degrees % 2:
        if degrees > 1:
            term = math.cos(theta)
            total = term
            for k in range(3, degrees - 1, 2):
                term *= cos2 * (k - 1) / k
                total += term
        inside = 2 / math.pi * (theta + math.sin(theta) * total)
    else:
        total = 1.0
        for k in range(2, degrees - 1, 2):
            term *= cos2 * (k - 1) / k
            total += term
        inside = math.sin(theta) * total
    return 0.5 + inside / 2
