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
from gateway.gauges import Gauges
from gateway.record import RequestRecord, TokenSource
from gateway.tally import CHOICES, DISTRIBUTIONS, REASONS, Tally, known
from policies.model import Ejected, FleetEvent, Outcome, Removed, Restarted, Returned

PRECISION_DECAY = 0.99  # weight of the past per request, so about the last hundred count
Counts: TypeAlias = defaultdict[tuple[str, ...], int]


class Metrics(Collector):
    """`record` and `event` feed it; the Prometheus registry calls `collect`."""

    def __init__(
        self,
        classes: Iterable[str],
        version: str,
        gauges: Callable[[], Gauges] = Gauges,
        tenants: Iterable[str] = (),
    ) -> None:
        self.classes = frozenset(classes)
        self.tenants = frozenset(tenants)
        self.gauges = gauges
        self._version = version
        self._tallies = {name: Tally() for name in self.classes}
        self._choices: Counts = defaultdict(int)
        self._by_policy: Counts = defaultdict(int)  # policy, arm of an experiment, partition
        self._by_tenant: Counts = defaultdict(int)  # tenant of the configuration, outcome
        self._attempts: Counts = defaultdict(int)
        self._ejections: Counts = defaultdict(int)
        self._returns: Counts = defaultdict(int)
        self._restarts: Counts = defaultdict(int)
        self._precision: dict[str, tuple[float, float]] = {}  # replica: cached tokens confirmed, believed
        self._retries = self._client_retries = 0

    def configure(self, classes: Iterable[str], tenants: Iterable[str]) -> None:
        """The names that labels may have from now on."""
        self.classes, self.tenants = frozenset(classes), frozenset(tenants)

    # -- feeding -----------------------------------------------------------------------------------------------

    def record(self, r: RequestRecord) -> None:
        """A request is over."""
        tally = self._tallies.get(r.service_class)
        if tally is None:
            tally = self._tally(r.service_class)
        tally.count(r)
        if r.partition is not None:
            self._by_policy[r.policy, r.arm or "", r.partition.value] += 1
        if r.tenant is not None:
            self._by_tenant[known(r.tenant, self.tenants), str(r.outcome)] += 1
        self._client_retries += r.client_retry > 0
        if r.attempts:
            for attempt in r.attempts:
                outcome = "success" if attempt.outcome is Outcome.SUCCESS else str(attempt.outcome)
                self._attempts[attempt.replica_id, outcome, known(attempt.detail, REASONS)] += 1
            self._retries += len(r.attempts) - 1
            self._choices[r.policy, known(r.choice_reason, CHOICES)] += 1
            if r.prediction is not None and r.prediction.cached_tokens > 0:
                self._confirm(r, r.prediction.cached_tokens)

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

    def _tally(self, service_class: str) -> Tally:
        name = known(service_class, self.classes)
        return self._tallies.setdefault(name, Tally())

    def _confirm(self, r: RequestRecord, expected: int) -> None:
        """How much of what was believed to be cached was, on the replica that answered."""
        if r.cached.source is TokenSource.USAGE and r.cached.count is not None:
            replica_id = r.attempts[-1].replica_id
            confirmed, believed = self._precision.get(replica_id, (0.0, 0.0))
            confirmed = PRECISION_DECAY * confirmed + min(r.cached.count, expected)
            self._precision[replica_id] = (confirmed, PRECISION_DECAY * believed + expected)

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
        tallies = self._tallies.items()
        requests: dict[tuple[str, ...], int] = {(name, *key): n for name, t in tallies for key, n in t.requests.items()}
        yield _counter("forebay_requests", "Requests that ended.", ("service_class", "outcome", "reason"), requests)
        yield _counter(
            "forebay_partitions",
            "Requests by partition; good over all is the attainment of a class.",
            ("service_class", "partition"),
            {(name, key): n for name, t in tallies for key, n in t.partitions.items()},
        )
        for attribute, name, help_text in DISTRIBUTIONS:
            family = HistogramMetricFamily(name, help_text, labels=("service_class",))
            for of_class, t in tallies:
                values: Distribution = getattr(t, attribute)
                family.add_metric([of_class], values.cumulative(), values.total)
            yield family
        yield _counter(
            "forebay_tokens",
            "Tokens by kind and by where the number comes from.",
            ("service_class", "kind", "source"),
            {(name, *key): n for name, t in tallies for key, n in t.tokens.items()},
        )
        yield _counter(
            "forebay_tenant_requests",
            "Requests that ended, by tenant; those without a known key are no tenant's.",
            ("tenant", "outcome"),
            self._by_tenant,
        )
        yield _counter("forebay_choices", "Dispatches by reason of the policy.", ("policy", "reason"), self._choices)
        yield _counter(
            "forebay_policy_requests",
            "Requests by routing policy, arm of an experiment and partition.",
            ("policy", "arm", "partition"),
            self._by_policy,
        )
        yield _counter("forebay_retries", "Attempts after the first of a request.", (), {(): self._retries})
        retries: dict[tuple[str, ...], int] = {(): self._client_retries}
        yield _counter("forebay_client_retries", "Requests that a client says are retries.", (), retries)

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


def _counter(name: str, help_text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=labels)
    for key, count in values.items():
        family.add_metric(list(key), float(count))
    return family
