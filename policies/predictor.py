"""How long prefill and decode take on each replica, learnt from what the streams show.

Prefill: the time from max(dispatch, previous first token) to a first token is one busy-period sample, free of
queueing: s = a + b u + c u (h + u/2), fitted by least squares with forgetting, clamped, outliers winsorised, and
shrunk to the fleet with pseudo-samples so that a new replica predicts sensibly. Decode: gaps between events while
no prefill is in progress (t_d) and while one is (t_p), as EWMAs of the pulses.
TTFT = a + seconds ahead + own seconds. Trade-off: a linear model with an online margin (`Margin`) instead of a learnt
one: it is right within tens of per cent and needs no training; the margin absorbs the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FORGET = 0.98  # per sample: a memory of about 50
PSEUDO = 8.0  # weight of the fleet's view in a replica's fit, in samples
WINSOR = 4.0  # a sample counts at most this many times what was predicted: peers or priorities break FCFS
LARGEST_MARGIN = 4.0  # a margin there means the predictor is broken
KILO, CONTEXT = 1e3, 1e8  # units of the two regressors: keep the sums of one size


class PrefillFit:
    """s = a + b u + c u (h + u/2): overhead, linear layers, attention of u new tokens to the h cached before them."""

    __slots__ = ("_sums", "overhead_s", "per_context_s", "per_token_s", "rate")

    def __init__(self, rate: float, overhead_s: float) -> None:
        self.rate = rate  # tokens/s over the mix seen
        self.overhead_s = overhead_s
        self.per_token_s, self.per_context_s = 1.0 / rate, 0.0  # b, c
        self._sums = [0.0] * 9  # weighted: 1, x, z, s, xx, xz, zz, xs, zs

    @property
    def weight(self) -> float:
        return self._sums[0]

    def seconds(self, uncached: float, cached: float) -> float:
        """Prefill seconds of one request alone, without overhead."""
        return uncached * (self.per_token_s + self.per_context_s * (cached + 0.5 * uncached))

    def add(self, tokens: float, context: float, seconds: float, prior: PrefillFit | None) -> None:
        """One busy period: `tokens` computed, `context` the sum of u (h + u/2) over its requests."""
        x, z = tokens / KILO, context / CONTEXT
        expected = self.overhead_s + self.per_token_s * tokens + self.per_context_s * context
        s = min(seconds, WINSOR * expected) if self._sums[0] > 0.0 else seconds
        w = 1.0 / max(expected, 0.02)  # the error grows with the length
        sums = self._sums
        new = (w, w * x, w * z, w * s, w * x * x, w * x * z, w * z * z, w * x * s, w * z * s)
        self._sums = sums = [FORGET * old + more for old, more in zip(sums, new, strict=True)]
        if prior is not None and prior._sums[0] > 0.0:
            k = PSEUDO * w / prior._sums[0]
            self._solve([a + k * b for a, b in zip(sums, prior._sums, strict=True)])
        else:
            self._solve(sums)

    def adopt(self, prior: PrefillFit) -> None:
        """Start from what the fleet knows."""
        self.rate, self.overhead_s = prior.rate, prior.overhead_s
        self.per_token_s, self.per_context_s = prior.per_token_s, prior.per_context_s

    def _solve(self, m: list[float]) -> None:
        """Least squares with non-negative coefficients: the largest set of regressors that gives them."""
        n, x, z, s, xx, xz, zz, xs, zs = m
        if xx <= 0.0 or s <= 0.0:
            return
        a = b = c = -1.0
        det = n * (xx * zz - xz * xz) - x * (x * zz - xz * z) + z * (x * xz - xx * z)
        if det > 1e-6 * n * xx * zz:
            a = (s * (xx * zz - xz * xz) - x * (xs * zz - xz * zs) + z * (xs * xz - xx * zs)) / det
            b = (n * (xs * zz - xz * zs) - s * (x * zz - xz * z) + z * (x * zs - xs * z)) / det
            c = (n * (xx * zs - xs * xz) - x * (x * zs - xs * z) + s * (x * xz - xx * z)) / det
        if min(a, b, c) < 0.0 and (det := xx * zz - xz * xz) > 1e-6 * xx * zz:
            a, b, c = 0.0, (xs * zz - zs * xz) / det, (zs * xx - xs * xz) / det
        if min(a, b, c) < 0.0 and (det := n * xx - x * x) > 1e-3 * n * xx:
            a, b, c = (s * xx - xs * x) / det, (n * xs - x * s) / det, 0.0
        if min(a, b, c) < 0.0 or b <= 0.0:
            a, b, c = 0.0, s / x, 0.0
        self.overhead_s, self.per_token_s, self.per_context_s = a, b / KILO, c / CONTEXT
        self.rate = KILO * x / (b * x + c * z)


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
        self.q = min(LARGEST_MARGIN, max(0.8, self.q * math.exp(self._eta * (late - self._miss))))


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
    """Margins per service class and length of the prediction: waiting for the step in progress doubles 0.1 s and is
    nothing against 10 s, so one factor for both would refuse long prompts that are safe."""

    EDGES_S = (0.5, 3.0)
    NAMES = ("short", "middle", "long")

    def __init__(self, target: float) -> None:
        self._target = target
        self._margins: dict[str, tuple[Margin, Margin, Margin]] = {}

    def bound(self, class_name: str, predicted_s: float) -> float:
        """Seconds that the target share of such requests stays under."""
        return self._of(class_name, predicted_s).q * predicted_s

    def observe(self, class_name: str, actual_s: float, predicted_s: float) -> None:
        self._of(class_name, predicted_s).observe(actual_s, predicted_s)

    def values(self) -> dict[str, dict[str, float]]:
        return {c: {n: m.q for n, m in zip(self.NAMES, three, strict=True)} for c, three in self._margins.items()}

    def _of(self, class_name: str, predicted_s: float) -> Margin:
        three = self._margins.get(class_name)
        if three is None:
            three = self._margins[class_name] = (Margin(self._target), Margin(self._target), Margin(self._target))
        return three[(predicted_s > self.EDGES_S[0]) + (predicted_s > self.EDGES_S[1])]


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
