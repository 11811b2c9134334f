"""How long prefill and decode take on each replica, learnt from what the streams show.

Prefill: the time from max(dispatch, previous first token) to a first token is one busy-period sample, free of
queueing: s = a + u / R, fitted by least squares with forgetting, clamped, outliers winsorised, and shrunk to
the fleet with pseudo-samples so that a new replica predicts sensibly. Decode: gaps between events while
no prefill is in progress (t_d) and while one is (t_p), as EWMAs of the pulses.
TTFT = a + (W + u) / R. Trade-off: a linear model with an online margin (`Margin`) instead of a learnt
one: it is right within tens of per cent and needs no training; the margin absorbs the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FORGET = 0.98  # per sample: a memory of about 50
PSEUDO = 8.0  # weight of the fleet's view in a replica's fit, in samples
WINSOR = 4.0  # a sample counts at most this many times what was predicted: peers or priorities break FCFS


@dataclass(slots=True)
class PrefillFit:
    """Weighted sums of busy-period samples (u tokens, s seconds)."""

    rate: float  # tokens/s
    overhead_s: float
    weight: float = 0.0
    u: float = 0.0
    s: float = 0.0
    uu: float = 0.0
    us: float = 0.0

    def add(self, tokens: float, seconds: float, prior: PrefillFit | None) -> None:
        expected = self.overhead_s + tokens / self.rate
        seconds = min(seconds, WINSOR * expected) if self.weight > 5.0 else seconds
        for name, value in (("weight", 1.0), ("u", tokens), ("s", seconds), ("uu", tokens * tokens)):
            setattr(self, name, getattr(self, name) * FORGET + value)
        self.us = self.us * FORGET + tokens * seconds
        self._solve(prior)

    def _solve(self, prior: PrefillFit | None) -> None:
        n, u, s, uu, us = self.weight, self.u, self.s, self.uu, self.us
        if prior is not None and prior.weight > 0.0:
            k = PSEUDO / prior.weight
            n, u, s, uu, us = n + PSEUDO, u + k * prior.u, s + k * prior.s, uu + k * prior.uu, us + k * prior.us
        spread = n * uu - u * u
        if u <= 0.0 or s <= 0.0:
            return
        slope = (n * us - u * s) / spread if spread > 0.05 * n * uu else s / u
        overhead = (s - slope * u) / n
        if slope <= 0.0 or overhead < 0.0:  # a line through the origin: the ratio of the sums
            slope, overhead = s / u, 0.0
        self.rate, self.overhead_s = 1.0 / slope, overhead


class Margin:
    """Online quantile of actual / predicted: q <- q x exp(eta x (1[x > q] - (1 - target))), bounded.

    It converges to the coverage asked for whatever the model's error, the winner's curse of choosing the
    smallest prediction included (robust online quantile, as in stochastic approximation)."""

    __slots__ = ("_eta", "_miss", "q", "samples")

    def __init__(self, target: float, eta: float = 0.02, start: float = 1.2) -> None:
        self.q, self._eta, self._miss = start, eta, 1.0 - target
        self.samples = 0

    def observe(self, actual_s: float, predicted_s: float) -> None:
        late = 1.0 if actual_s > self.q * predicted_s else 0.0
        self.samples += 1
        self.q = min(4.0, max(0.8, self.q * math.exp(self._eta * (late - self._miss))))


@dataclass(slots=True)
class DecodeFit:
    """Mean seconds per token with and without prefill beside it; None until seen."""

    idle_s: float | None = None
    busy_s: float | None = None

    def add(self, gaps: int, total_s: float, *, busy: bool) -> None:
        if gaps <= 0:
            return
        mean = total_s / gaps
        old = self.busy_s if busy else self.idle_s
        keep = 0.98 ** min(gaps, 50)
        new = mean if old is None else keep * old + (1.0 - keep) * mean
        if busy:
            self.busy_s = new
        else:
            self.idle_s = new

    def mean(self, share: float) -> float | None:
        """Seconds per token when `share` of the time goes to prefill; None until a gap was seen."""
        if self.idle_s is None or self.busy_s is None:
            return self.idle_s or self.busy_s
        return 1.0 / (share / self.busy_s + (1.0 - share) / self.idle_s)


class OutputPrior:
    """Expected output tokens by class: an EWMA; max_tokens only caps it, because clients over-ask."""

    __slots__ = ("_mean",)

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def expected(self, service_class: str, max_tokens: int | None, told: int) -> float:
        guess = float(told) if told > 0 else self._mean.get(service_class, 256.0)
        return min(guess, float(max_tokens)) if max_tokens else guess

    def observe(self, service_class: str, tokens: int) -> None:
        old = self._mean.get(service_class)
        self._mean[service_class] = float(tokens) if old is None else old + 0.02 * (tokens - old)


class Margins:
    """One margin per service class, made when first needed."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._by_class: dict[str, Margin] = {}

    def of(self, class_name: str) -> Margin:
        found = self._by_class.get(class_name)
        if found is None:
            found = self._by_class[class_name] = Margin(self._target)
        return found

    def values(self) -> dict[str, float]:
        return {name: margin.q for name, margin in self._by_class.items()}


class Errors:
    """Error of the predicted TTFT: EWMA of |actual - predicted| / actual, and of its sign."""

    __slots__ = ("bias", "relative", "samples")

    def __init__(self) -> None:
        self.relative = self.bias = 0.0
        self.samples = 0

    def observe(self, actual_s: float, predicted_s: float) -> None:
        if actual_s <= 0.0:
            return
        self.samples += 1
        weight = max(0.02, 1.0 / self.samples)
        error = (predicted_s - actual_s) / actual_s
        self.relative += weight * (min(abs(error), 10.0) - self.relative)
        self.bias += weight * (max(-10.0, min(error, 10.0)) - self.bias)
