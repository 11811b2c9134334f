"""What is counted of the requests of one service class, and the closed sets that its label values come from.

Fed once per request, at its end, so it is written for speed: plain dictionaries and distributions, no label objects.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TypeVar

from gateway.distribution import Distribution
from gateway.errors import Code
from gateway.record import RequestRecord, TokenSource
from gateway.signals import Sign
from policies.model import Outcome
from policies.objectives import Partition

Key = TypeVar("Key")
_SOURCES = tuple(TokenSource)

LATENCY_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0),
    *(10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0),
)
PACE_S = (
    *(0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.6, 1.0, 2.0, 5.0),
)
RATIO = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
DISTRIBUTIONS = (  # attribute of a Tally, series, help
    ("ttft", "forebay_ttft_seconds", "Receipt to first content event, streamed and complete requests."),
    ("tpot", "forebay_tpot_seconds", "Mean time per output token after the first, streamed and complete requests."),
    ("longest_gap", "forebay_longest_gap_seconds", "Longest gap between content events of a complete stream."),
    ("e2e", "forebay_e2e_seconds", "Receipt to clean end, complete requests."),
    ("queue_wait", "forebay_queue_wait_seconds", "Receipt to first dispatch."),
    ("ttft_prediction", "forebay_ttft_prediction_ratio", "Time to first token since dispatch over what was predicted."),
)
CHOICES = frozenset(
    {
        "affinity",
        "spill",
        "cold",
        "load",
        "turn",
        "random",
        "only_one",
        "least_late",
        "none_available",
        "weight",
        "mixed",
        "fallback",
        "adopted",
    }
)
FAILURES = {
    *("connect_timeout", "no_socket", "preempted", "client_left", "client_stalled", "http_5xx", "worker_lost"),
    *(f"http_{s}" for s in HTTPStatus if s >= 400),
}
REASONS = frozenset({c.value for c in Code} | {s.value for s in Sign} | FAILURES)


def known(value: str, values: frozenset[str]) -> str:
    return value if value in values or not value else "other"


class Tally:
    __slots__ = (
        "_partitions", "_requests", "cached", "completion", "e2e", "good", "longest_gap", "prompt", "queue_wait",
        "tpot", "ttft", "ttft_prediction",
    )  # fmt: skip

    def __init__(self) -> None:
        self.good = 0  # successes that met all their objectives: the rule, so they cost one addition
        self._requests: dict[tuple[str, str], int] = {}  # (outcome, reason) of all others
        self._partitions: dict[str, int] = {}
        self.prompt, self.completion, self.cached = ([0] * len(_SOURCES) for _ in range(3))  # tokens by source
        self.ttft, self.e2e, self.queue_wait = Distribution(LATENCY_S), Distribution(LATENCY_S), Distribution(LATENCY_S)
        self.tpot, self.longest_gap = Distribution(PACE_S), Distribution(PACE_S)
        self.ttft_prediction = Distribution(RATIO)

    def count(self, r: RequestRecord) -> None:
        """A request of this class is over."""
        received_at, attempts = r.received_at, r.attempts
        if r.outcome is Outcome.SUCCESS and not r.reason and r.partition is Partition.GOOD:
            self.good += 1
        else:
            self._count_other(r)
        if r.outcome is Outcome.SUCCESS:
            if r.streams and r.first_content_at is not None:
                self.ttft.add(r.first_content_at - received_at)
                tpot = r.tpot_s
                if tpot is not None:
                    self.tpot.add(tpot)
                    self.longest_gap.add(r.longest_gap_s)
            if r.ended_at is not None:
                self.e2e.add(r.ended_at - received_at)
        if attempts:
            self.queue_wait.add(attempts[0].t_dispatch - received_at)
            last, belief = attempts[-1], r.prediction
            if last.t_first is not None and belief is not None and r.streams and belief.ttft_s > 0:
                self.ttft_prediction.add((last.t_first - last.t_dispatch) / belief.ttft_s)
        for counts, measured in ((self.prompt, r.prompt), (self.completion, r.completion), (self.cached, r.cached)):
            if measured.count:
                counts[_SOURCES.index(measured.source)] += measured.count

    def _count_other(self, r: RequestRecord) -> None:
        key = (str(r.outcome), known(r.reason, REASONS))
        self._requests[key] = self._requests.get(key, 0) + 1
        if r.partition is not None:
            partition = str(r.partition)
            self._partitions[partition] = self._partitions.get(partition, 0) + 1

    @property
    def requests(self) -> dict[tuple[str, str], int]:
        """By outcome and reason."""
        return _with(self._requests, (Outcome.SUCCESS.value, ""), self.good)

    @property
    def partitions(self) -> dict[str, int]:
        return _with(self._partitions, Partition.GOOD.value, self.good)

    @property
    def tokens(self) -> dict[tuple[str, str], int]:
        """By kind and source."""
        kinds = (("prompt", self.prompt), ("completion", self.completion), ("cached", self.cached))
        return {
            (kind, source.value): n for kind, counts in kinds for source, n in zip(_SOURCES, counts, strict=True) if n
        }


def _with(counts: dict[Key, int], key: Key, more: int) -> dict[Key, int]:
    return {**counts, key: counts.get(key, 0) + more} if more else counts
