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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

FORGET: Final = 0.98  # per sample: a memory of about 50; of the first samples less, they pay for cold graphs and caches
MEMORY: Final = 1.0 / (1.0 - FORGET)
LEAST_SAMPLES: Final = 4  # before a replica may differ from its fleet: the first one is often a compilation
PSEUDO: Final = 8.0  # weight of the fleet's view in a replica's fit, in samples
RIDGE: Final = 0.3  # weight of each coefficient believed before, in samples of 1,000 tokens
WINSOR: Final = 4.0  # a sample counts at most this many times what was predicted: peers or priorities break FCFS
FASTEST: Final = 64.0  # times the rate believed before: engines that answer at once do not divide by zero
LEAST_MARGIN: Final = 0.8
LARGEST_MARGIN: Final = 4.0  # a margin there means the predictor is broken
KILO: Final = 1e3  # units of the two regressors: keep the sums of one size
CONTEXT: Final = 1e8


class PrefillFit:
    """s = a y + b u + c u (h + u/2): latency, linear layers, attention of u new tokens to the h cached before them."""

    __slots__ = (
        "_believed", "_one", "_x", "_xs", "_xx", "_xz", "_y", "_ys", "_yx", "_yz", "_z", "_zs", "_zz",
        "hinted", "overhead_s", "per_context_s", "per_token_s", "rate", "samples",
    )  # fmt: skip

    def __init__(self, rate: float, overhead_s: float, *, hinted: bool = False) -> None:
        """hinted: somebody who knows the replica said so, and it stands until the replica itself shows otherwise."""
        self.hinted = hinted
        self.rate = rate  # tokens/s over the mix seen
        self.overhead_s = overhead_s
        self.per_token_s, self.per_context_s = 1.0 / rate, 0.0  # b, c
        self._believed = (overhead_s, KILO / rate, 0.0)  # before any sample
        self.samples = 0
        # weighted sums of 1, x, z, then y, yx, yz, ys, xx, xz, zz, xs, zs
        self._one = self._x = self._z = self._y = self._yx = self._yz = 0.0
        self._ys = self._xx = self._xz = self._zz = self._xs = self._zs = 0.0

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
        s = seconds
        if self.samples and s > (bound := WINSOR * max(expected, 0.02)):
            s = bound
        w = 1.0 / (0.02 + self._believed[0] * y + self._believed[1] * x)  # the error grows with the length
        keep = min(FORGET, (self.samples + 1.0) / (self.samples + 3.0))
        self.samples += 1
        wx, wz = w * x, w * z
        self._one = keep * self._one + w
        self._x = keep * self._x + wx
        self._z = keep * self._z + wz
        self._y = keep * self._y + w * y
        self._yx = keep * self._yx + wx * y
        self._yz = keep * self._yz + wz * y
        self._ys = keep * self._ys + w * s * y
        self._xx = keep * self._xx + wx * x
        self._xz = keep * self._xz + wx * z
        self._zz = keep * self._zz + wz * z
        self._xs = keep * self._xs + wx * s
        self._zs = keep * self._zs + wz * s
        self.settle(prior)

    def settle(self, prior: PrefillFit | None) -> None:
        """Solves again, with what the fleet knows by now; a replica that showed little yet takes that over."""
        if prior is not None and self.samples < LEAST_SAMPLES:
            if prior.samples and not self.hinted:
                self.adopt(prior)
            return
        one = self._one / min(float(self.samples), MEMORY)  # weight of a sample, about
        ridge = RIDGE * one
        if prior is None or not prior.samples:
            a0, b0, c0 = self._believed
            self._solve(self._x, self._z, self._y, self._yx, self._yz, self._ys, self._xx, self._xz, self._zz,
                        self._xs, self._zs, a0, b0, c0, ridge)  # fmt: skip
            return
        p, k = prior, PSEUDO * one / prior._one
        self._solve(
            self._x + k * p._x, self._z + k * p._z, self._y + k * p._y, self._yx + k * p._yx, self._yz + k * p._yz,
            self._ys + k * p._ys, self._xx + k * p._xx, self._xz + k * p._xz, self._zz + k * p._zz,
            self._xs + k * p._xs, self._zs + k * p._zs,
            p.overhead_s, p.per_token_s * KILO, p.per_context_s * CONTEXT, ridge,
        )  # fmt: skip

    def adopt(self, prior: PrefillFit) -> None:
        """Start from what the fleet knows."""
        self.rate, self.overhead_s = prior.rate, prior.overhead_s
        self.per_token_s, self.per_context_s = prior.per_token_s, prior.per_context_s

    def believes(self) -> tuple[float, float, float, float]:
        """Overhead in seconds, seconds per token and per token and context, tokens/s over the mix seen."""
        return self.overhead_s, self.per_token_s, self.per_context_s, self.rate

    def believe(self, said: Sequence[float]) -> None:
        """As one before it believed; stands until samples show otherwise."""
        self.overhead_s, self.per_token_s, self.per_context_s, self.rate = said
        self._believed = (self.overhead_s, self.per_token_s * KILO, self.per_context_s * CONTEXT)
        self.hinted = True

    def _solve(
        self, mx: float, mz: float, y: float, yx: float, yz: float, ys: float, xx: float, xz: float, zz: float,
        xs: float, zs: float, a0: float, b0: float, c0: float, r: float,
    ) -> None:  # fmt: skip
        """Ridge regression with non-negative coefficients: those that would be negative are zero."""
        y, xx, zz, ys, xs, zs = y + r, xx + r, zz + r, ys + r * a0, xs + r * b0, zs + r * c0
        # Cramer's rule; minors that several determinants share
        xx_zz, yx_zz, yx_xz = xx * zz - xz * xz, yx * zz - xz * yz, yx * xz - xx * yz
        xs_zz, xs_xz, yx_zs = xs * zz - xz * zs, xs * xz - xx * zs, yx * zs - xs * yz
        det = y * xx_zz - yx * yx_zz + yz * yx_xz
        a = (ys * xx_zz - yx * xs_zz + yz * xs_xz) / det
        b = (y * xs_zz - ys * yx_zz + yz * yx_zs) / det
        c = (y * (xx * zs - xs * xz) - yx * yx_zs + ys * yx_xz) / det
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
        q = self.q * factor
        self.q = LEAST_MARGIN if q < LEAST_MARGIN else LARGEST_MARGIN if q > LARGEST_MARGIN else q


SHORTEST_STEP_S: Final = 1e-6  # events that came in one read have no gap, and no engine needs no time


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


SHORT_S: Final = 0.5  # predictions up to the one are short, beyond the other long
LONG_S: Final = 3.0


class Margins:
    """Margins per service class and length of the prediction: waiting for the step in progress doubles 0.1 s and is
    nothing against 10 s, so one factor for both would refuse long prompts that are safe."""

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

    def recall(self, said: Mapping[str, Mapping[str, float]]) -> None:
        """`values` of one before it, of classes that have shown nothing here."""
        for class_name, bands in said.items():
            if class_name not in self._margins:
                for (name, q), edge_s in zip(bands.items(), (0.0, 1.0, math.inf), strict=True):
                    assert name in self.NAMES
                    self._of(class_name, edge_s).q = q

    def _of(self, class_name: str, predicted_s: float) -> Margin:
        three = self._margins.get(class_name)
        if three is None:
            three = self._margins[class_name] = (Margin(self._target), Margin(self._target), Margin(self._target))
        if predicted_s <= SHORT_S:
            return three[0]
        return three[1] if predicted_s <= LONG_S else three[2]


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
        weight = 1.0 / self.samples if self.samples < 50 else 0.02
        error = (predicted_s - actual_s) / actual_s  # above -1
        if error > 10.0:
            error = 10.0
        self.relative += weight * (abs(error) - self.relative)
        self.bias += weight * (error - self.bias)
