"""Random numbers that are equal on every machine and in every Python.

splitmix64 (Steele, Lea and Flood 2014) over 64-bit integers; uniforms from the top 53 bits. Logarithm and
exponential are computed here from the four IEEE operations, because the C library's may differ in the last
bit between machines and a schedule must have the same sha256 everywhere. Names, never call order, separate
streams, so adding a draw in one place moves nothing elsewhere. Trade-off: about a microsecond a number.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LN2_HIGH = 6.93147180369123816490e-01  # ln 2 in two parts, so that x - k ln 2 is exact to the last bit
_LN2_LOW = 1.90821492927058770002e-10


def mix(*values: int) -> int:
    """One 63-bit hash of the integers, in order."""
    state = 0
    for value in values:
        state = (state + _GOLDEN) ^ value
        state &= _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def name_id(name: str) -> int:
    """A 64-bit integer for a string; Python's own hash() is salted and would differ between processes."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def log(x: float) -> float:
    """Natural logarithm for x > 0, from IEEE operations alone; error below 2e-15 relative."""
    mantissa, exponent = math.frexp(x)
    if mantissa < 0.7071067811865476:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square, power, total = s * s, s, 0.0
    for k in range(1, 27, 2):
        total += power / k
        power *= square
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + 2.0 * total)


def exp(x: float) -> float:
    """e to the x for |x| < 700, from IEEE operations alone."""
    k = round(x / (_LN2_HIGH + _LN2_LOW))
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    term = total = 1.0
    for i in range(1, 18):
        term *= r / i
        total += term
    return math.ldexp(total, k)


class Stream:
    """A sequence of random numbers named by a seed and any number of strings."""

    __slots__ = ("_spare", "_state")

    def __init__(self, seed: int, *names: str) -> None:
        self._state = mix(seed & _MASK, *(name_id(name) for name in names))
        self._spare: float | None = None

    def bits(self) -> int:
        """64 random bits."""
        self._state = (self._state + _GOLDEN) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """In [low, high)."""
        return low + (high - low) * ((self.bits() >> 11) * 2.0**-53)

    def below(self, n: int) -> int:
        """A whole number in [0, n); the bias is under n / 2^64."""
        return (self.bits() * n) >> 64

    def exponential(self, mean: float) -> float:
        return -mean * log(1.0 - self.uniform())

    def normal(self) -> float:
        """Standard normal by Marsaglia's polar method (1964)."""
        if self._spare is not None:
            value, self._spare = self._spare, None
            return value
        while True:
            u, v = self.uniform(-1.0, 1.0), self.uniform(-1.0, 1.0)
            s = u * u + v * v
            if 0.0 < s < 1.0:
                scale = math.sqrt(-2.0 * log(s) / s)
                self._spare = v * scale
                return u * scale

    def lognormal(self, p50: float, p90: float) -> float:
        """Log-normal with these two quantiles; 1.2816 is the normal's 0.9 quantile."""
        return p50 * exp(log(p90 / p50) / 1.2815515655446004 * self.normal())

    def gamma(self, shape: float, scale: float = 1.0) -> float:
        """Marsaglia and Tsang (2000); below shape 1 by their boost."""
        if shape < 1.0:
            return self.gamma(shape + 1.0, scale) * exp(log(1.0 - self.uniform()) / shape)
        d = shape - 1.0 / 3.0
        c = 1.0 / math.sqrt(9.0 * d)
        while True:
            x = self.normal()
            w = 1.0 + c * x
            v = w * w * w if w > 0.0 else 0.0
            if v > 0.0 and log(1.0 - self.uniform()) < 0.5 * x * x + d - d * v + d * log(v):
                return d * v * scale

    def weibull(self, shape: float, scale: float = 1.0) -> float:
        hazard = -log(1.0 - self.uniform())
        return scale * exp(log(hazard) / shape) if hazard > 0.0 else 0.0

    def poisson_times(self, rate_per_s: float, span_s: float) -> list[float]:
        """Arrival times of a Poisson process on [0, span)."""
        times: list[float] = []
        at = self.exponential(1.0 / rate_per_s)
        while at < span_s:
            times.append(at)
            at += self.exponential(1.0 / rate_per_s)
        return times


class Zipf:
    """Ranks 0..n-1 with probability proportional to 1 / (rank + 1)^alpha."""

    def __init__(self, n: int, alpha: float) -> None:
        self._reach: list[float] = []
        total = 0.0
        for rank in range(1, n + 1):
            total += exp(-alpha * log(float(rank)))
            self._reach.append(total)

    def draw(self, stream: Stream) -> int:
        return min(bisect_right(self._reach, stream.uniform() * self._reach[-1]), len(self._reach) - 1)
