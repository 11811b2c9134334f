"""Every series the gateway exports, in one place: names, labels, buckets. All start with `forebay_`.

Requests are counted when they end, once, from their record. Label values come from closed sets (classes of the
configuration, outcomes, reasons, replicas of the fleet): whatever a client sends, there is never a new series; what
is in no set is "other". Gauges of replicas are read at scrape time, so a removed replica is gone from the next page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gateway.distribution import Distribution
from gateway.errors import Code
from gateway.gauges import Gauges
from gateway.record import RequestRecord, TokenSource
from gateway.signals import Sign
from policies.model import Ejected, FleetEvent, Outcome, Removed, Restarted, Returned

LATENCY_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0),
    *(10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0),
)
PACE_S = (
    *(0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.6, 1.0, 2.0, 5.0),
)
RATIO = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)

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
    }
)
REASONS = frozenset({c.value for c in Code} | {s.value for s in Sign} | CHOICES)
PRECISION_DECAY = 0.99  # weight of the past per request, so about the last hundred count


Counts: TypeAlias = defaultdict[tuple[str, ...], int]


def known(value: str, values: frozenset[str]) -> str:
    return value if value in values or not value else "other"


class Metrics(Collector):
    """`record` and `event` feed it; the Prometheus registry calls `collect`."""

    def __init__(self, classes: Iterable[str], version: str, gauges: Callable[[], Gauges] = Gauges) -> None:
        self.classes = frozenset(classes)
        self.gauges = gauges
        self._version = version
        self._requests: Counts = defaultdict(int)
        self._partitions: Counts = defaultdict(int)
        self._seconds: dict[tuple[str, str], Distribution] = {}
        self._tokens: Counts = defaultdict(int)
        self._choices: Counts = defaultdict(int)
        self._attempts: Counts = defaultdict(int)
        self._ejections: Counts = defaultdict(int)
        self._returns: Counts = defaultdict(int)
        self._restarts: Counts = defaultdict(int)
        self._precision: dict[str, list[float]] = {}  # replica: cached tokens confirmed, believed
        self._retries = self._client_retries = 0

    # -- feeding -----------------------------------------------------------------------------------------------

    def record(self, r: RequestRecord) -> None:
        """A request is over."""
        name = known(r.service_class, self.classes)
        reason = known(r.reason, REASONS)
        self._requests[name, r.outcome.value if r.outcome else "other", reason] += 1
        if r.partition is not None:
            self._partitions[name, r.partition.value] += 1
        if r.outcome is Outcome.SUCCESS:
            self._observe("ttft", name, LATENCY_S, r.ttft_s if r.streams else None)
            self._observe("tpot", name, PACE_S, r.tpot_s if r.streams else None)
            self._observe("longest_gap", name, PACE_S, r.longest_gap_s if r.content_events > 1 else None)
            self._observe("e2e", name, LATENCY_S, r.e2e_s)
        self._observe("queue_wait", name, LATENCY_S, r.queue_wait_s)
        for kind, tokens in (("prompt", r.prompt), ("completion", r.completion), ("cached", r.cached)):
            if tokens.count:
                self._tokens[name, kind, tokens.source.value] += tokens.count
        self._client_retries += r.client_retry > 0
        for attempt in r.attempts:
            outcome = attempt.outcome.value if attempt.outcome else "other"
            self._attempts[attempt.replica_id, outcome, known(attempt.detail, REASONS)] += 1
        if r.attempts:
            self._retries += len(r.attempts) - 1
            self._choices[r.policy, known(r.choice_reason, CHOICES)] += 1
            self._learn(r, name)

    def event(self, event: FleetEvent) -> None:
        """Something happened to a replica."""
        match event:
            case Ejected() if event.reason != "starting":  # it was never in
                self._ejections[event.replica_id, known(event.reason, REASONS)] += 1
            case Returned(half_open=True):
                self._returns[event.replica_id,] += 1
            case Restarted():
                self._restarts[event.replica_id,] += 1
            case Removed():
                self._forget(event.replica_id)

    def _observe(self, what: str, name: str, bounds: tuple[float, ...], value: float | None) -> None:
        if value is not None:
            found = self._seconds.get((what, name))
            if found is None:
                found = self._seconds[what, name] = Distribution(bounds)
            found.add(value)

    def _learn(self, r: RequestRecord, name: str) -> None:
        """How right the core was, from the attempt that answered."""
        last, belief = r.attempts[-1], r.prediction
        if belief is None:
            return
        if last.t_first is not None and r.streams and belief.ttft_s > 0:
            self._observe("ttft_prediction", name, RATIO, (last.t_first - last.t_dispatch) / belief.ttft_s)
        if belief.cached_tokens > 0 and r.cached.source is TokenSource.USAGE and r.cached.count is not None:
            confirmed, believed = self._precision.get(last.replica_id, (0.0, 0.0))
            confirmed = PRECISION_DECAY * confirmed + min(r.cached.count, belief.cached_tokens)
            self._precision[last.replica_id] = [confirmed, PRECISION_DECAY * believed + belief.cached_tokens]

    def _forget(self, replica_id: str) -> None:
        for counts in (self._attempts, self._ejections, self._returns, self._restarts):
            for key in [k for k in counts if k[0] == replica_id]:
                del counts[key]
        self._precision.pop(replica_id, None)

    # -- the page ----------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        g = self.gauges()
        info = InfoMetricFamily("forebay_build", "Version of the gateway.")
        info.add_metric([], {"version": self._version})
        yield info
        yield from self._of_requests()
        yield from self._of_attempts(set(g.replicas))
        yield from g.of_replicas()
        yield from g.of_gateway()

    def _of_requests(self) -> Iterator[Metric]:
        yield _counter(
            "forebay_requests", "Requests that ended.", ("service_class", "outcome", "reason"), self._requests
        )
        yield _counter(
            "forebay_partitions",
            "Requests by partition; good over all is the attainment of a class.",
            ("service_class", "partition"),
            self._partitions,
        )
        for what, help_text in SECONDS.items():
            unit = "_ratio" if what == "ttft_prediction" else "_seconds"
            family = HistogramMetricFamily(f"forebay_{what}{unit}", help_text, labels=("service_class",))
            for (measured, name), values in self._seconds.items():
                if measured == what:
                    family.add_metric([name], values.cumulative(), values.total)
            yield family
        yield _counter(
            "forebay_tokens",
            "Tokens by kind and by where the number comes from.",
            ("service_class", "kind", "source"),
            self._tokens,
        )
        yield _counter("forebay_choices", "Dispatches by reason of the policy.", ("policy", "reason"), self._choices)
        yield _counter("forebay_retries", "Attempts after the first of a request.", (), {(): self._retries})
        yield _counter(
            "forebay_client_retries", "Requests that a client says are retries.", (), {(): self._client_retries}
        )

    def _of_attempts(self, replicas: set[str]) -> Iterator[Metric]:
        """Attempts that end after their replica was removed must not bring its labels back."""
        named = {key[0] for key in (*self._attempts, *self._ejections, *self._returns, *self._restarts)}
        for gone in (named | self._precision.keys()) - replicas:
            self._forget(gone)
        yield _counter("forebay_attempts", "Attempts that ended.", ("replica", "outcome", "reason"), self._attempts)
        yield _counter("forebay_ejections", "Times out of rotation.", ("replica", "reason"), self._ejections)
        yield _counter("forebay_returns", "Returns to rotation.", ("replica",), self._returns)
        yield _counter("forebay_restarts", "Restarts of a replica that were noticed.", ("replica",), self._restarts)
        precision = GaugeMetricFamily(
            "forebay_prefix_precision", "Cached tokens confirmed over cached tokens expected.", labels=("replica",)
        )
        for id, (confirmed, believed) in self._precision.items():
            precision.add_metric([id], confirmed / believed)
        yield precision


SECONDS = {
    "ttft": "Receipt to first content event, streamed and complete requests.",
    "tpot": "Mean time per output token after the first, streamed and complete requests.",
    "longest_gap": "Longest gap between content events of a complete stream.",
    "e2e": "Receipt to clean end, complete requests.",
    "queue_wait": "Receipt to first dispatch.",
    "ttft_prediction": "Time to first token since dispatch over what was predicted.",
}


def _counter(name: str, help_text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=labels)
    for key, count in values.items():
        family.add_metric(list(key), float(count))
    return family
