"""How long prefill and decode take on each replica, learnt from what the streams show.

Prefill: s = a y + b u + c u (h + u/2). A first token after an idle start, or after no longer than alone, shows the
latency a too (y = 1); one that queued shows only the time since the first token before it (y = 0), free of queueing:
so overhead is latency and never serial service. Least squares with forgetting, outliers winsorised, shrunk to the
fleet with pseudo-samples and a ridge: what prompts of one length cannot tell apart stays near what was believed, short
ones speaking about a and long ones about b. Decode: gaps while no prefill is in progress (t_d) and while one is (t_p).
TTFT = a + seconds ahead + own seconds. Trade-off: a linear model with an online margin (`Margin`) instead of a learnt
one: it is right within tens of per cent and needs no training; the margin absorbs the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FORGET = 0.98  # per sample: a memory of about 50; of the first samples less, they pay for cold graphs and caches
LEAST_SAMPLES = 4  # before a replica may differ from its fleet: the first one is often a compilation
PSEUDO = 8.0  # weight of the fleet's view in a replica's fit, in samples
RIDGE = 0.3  # weight of each coefficient believed before, in samples of 1,000 tokens
WINSOR = 4.0  # a sample counts at most this many times what was predicted: peers or priorities break FCFS
FASTEST = 64.0  # times the rate believed before: engines that answer at once do not divide by zero
LARGEST_MARGIN = 4.0  # a margin there means the predictor is broken
KILO, CONTEXT = 1e3, 1e8  # units of the two regressors: keep the sums of one size


class PrefillFit:
    """s = a y + b u + c u (h + u/2): latency, linear layers, attention of u new tokens to the h cached before them."""

    __slots__ = ("_believed", "_hinted", "_samples", "_sums", "overhead_s", "per_context_s", "per_token_s", "rate")

    def __init__(self, rate: float, overhead_s: float, *, hinted: bool = False) -> None:
        """hinted: somebody who knows the replica said so, and it stands until the replica itself shows otherwise."""
        self._hinted = hinted
        self.rate = rate  # tokens/s over the mix seen
        self.overhead_s = overhead_s
        self.per_token_s, self.per_context_s = 1.0 / rate, 0.0  # b, c
        self._believed = (overhead_s, KILO / rate, 0.0)  # before any sample
        self._samples = 0
        self._sums = [0.0] * 12  # weighted: 1, x, z, then y, yx, yz, ys, xx, xz, zz, xs, zs

    @property
    def samples(self) -> int:
        return self._samples

    def seconds(self, uncached: float, cached: float) -> float:
        """Prefill seconds of one request alone, without overhead."""
        return uncached * (self.per_token_s + self.per_context_s * (cached + 0.5 * uncached))

    def add(
        self, tokens: float, context: float, seconds: float, prior: PrefillFit | None, *, latency: bool = True
    ) -> None:
        """One busy period: `tokens` computed, `context` the sum of u (h + u/2) over its requests.

        latency: the overhead is in `seconds`; False for what queued behind others.
        """
        x, z, y = tokens / KILO, context / CONTEXT, 1.0 if latency else 0.0
        expected = y * self.overhead_s + self.per_token_s * tokens + self.per_context_s * context
        s = min(seconds, WINSOR * max(expected, 0.02)) if self._samples else seconds
        w = 1.0 / (0.02 + self._believed[0] * y + self._believed[1] * x)  # the error grows with the length
        new = (w, w * x, w * z, w * y, w * x * y, w * z * y, w * s * y, w * x * x, w * x * z, w * z * z, w * x * s,
               w * z * s)  # fmt: skip
        keep = min(FORGET, (self._samples + 1.0) / (self._samples + 3.0))
        self._samples += 1
        self._sums = [keep * old + more for old, more in zip(self._sums, new, strict=True)]
        self.settle(prior)

    def settle(self, prior: PrefillFit | None) -> None:
        """Solves again, with what the fleet knows by now; a replica that showed little yet takes that over."""
        if prior is not None and self._samples < LEAST_SAMPLES:
            if prior._samples and not self._hinted:
                self.adopt(prior)
            return
        one = self._sums[0] / min(self._samples, 1.0 / (1.0 - FORGET))  # weight of a sample, about
        if prior is None or not prior._samples:
            self._solve(self._sums, self._believed, RIDGE * one)
            return
        k = PSEUDO * one / prior._sums[0]
        believed = (prior.overhead_s, prior.per_token_s * KILO, prior.per_context_s * CONTEXT)
        self._solve([a + k * b for a, b in zip(self._sums, prior._sums, strict=True)], believed, RIDGE * one)

    def adopt(self, prior: PrefillFit) -> None:
        """Start from what the fleet knows."""
        self.rate, self.overhead_s = prior.rate, prior.overhead_s
        self.per_token_s, self.per_context_s = prior.per_token_s, prior.per_context_s

    def _solve(self, m: Sequence[float], believed: tuple[float, float, float], r: float) -> None:
        """Ridge regression with non-negative coefficients: those that would be negative are zero."""
        _, mx, mz, y, yx, yz, ys, xx, xz, zz, xs, zs = m
        a0, b0, c0 = believed
        y, xx, zz, ys, xs, zs = y + r, xx + r, zz + r, ys + r * a0, xs + r * b0, zs + r * c0
        det = y * (xx * zz - xz * xz) - yx * (yx * zz - xz * yz) + yz * (yx * xz - xx * yz)
        a = (ys * (xx * zz - xz * xz) - yx * (xs * zz - xz * zs) + yz * (xs * xz - xx * zs)) / det
        b = (y * (xs * zz - xz * zs) - ys * (yx * zz - xz * yz) + yz * (yx * zs - xs * yz)) / det
        c = (y * (xx * zs - xs * xz) - yx * (yx * zs - xs * yz) + ys * (yx * xz - xx * yz)) / det
        if c < 0.0:
            det = y * xx - yx * yx
            a, b, c = (ys * xx - xs * yx) / det, (y * xs - yx * ys) / det, 0.0
        if a < 0.0:
            det = xx * zz - xz * xz
            a, b, c = 0.0, (xs * zz - zs * xz) / det, (zs * xx - xs * xz) / det
        if c < 0.0:
            a, b, c = 0.0, xs / xx, 0.0
        if b < b0 / FASTEST:
            a, b = ys / y, b0 / FASTEST
        self.overhead_s, self.per_token_s, self.per_context_s = a, b / KILO, c / CONTEXT
        self.rate = KILO * mx / (b * mx + c * mz) if mx > 0.0 else KILO / b


class Margin:
    """Online quantile of actual / predicted: q <- q x exp(eta x (1[x > q] - (1 - target))), bounded.

    It converges to the coverage asked for whatever the model's error, the winner's curse of choosing the
    smallest prediction included (robust online quantile, as in stochastic approximation)."""

    __slots__ = ("_down", "_up", "q", "samples")

    def __init__(self, target: float, eta: float = 0.02, start: float = 1.2) -> None:
        self.q, miss = start, 1.0 - target
        self._up, self._down = math.exp(eta * (1.0 - miss)), math.exp(eta * (0.0 - miss))
        self.samples = 0

    def observe(self, actual_s: float, predicted_s: float) -> None:
        factor = self._up if actual_s > self.q * predicted_s else self._down
        self.samples += 1
        self.q = min(LARGEST_MARGIN, max(0.8, self.q * factor))


SHORTEST_STEP_S = 1e-6  # events that came in one read have no gap, and no engine needs no time


@dataclass(slots=True)
class DecodeFit:
    """Mean seconds per token with and without prefill beside it; None until seen."""

    idle_s: float | None = None
    busy_s: float | None = None

    def add(self, gaps: int, total_s: float, *, busy: bool) -> None:
        if gaps <= 0:
            return
        mean = max(SHORTEST_STEP_S, total_s / gaps)
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
