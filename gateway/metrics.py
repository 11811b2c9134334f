"""Every series the gateway exports, in one place: names, labels, buckets. All start with `forebay_`.

Requests are counted when they end, once, from their record. Label values come from closed sets (classes of the
configuration, outcomes, reasons, replicas of the fleet): whatever a client sends, there is never a new series; what
is in no set is "other". Gauges of replicas are read at scrape time, so a removed replica is gone from the next page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gateway.counted import Counted
from gateway.distribution import Distribution
from gateway.gauges import Gauges
from gateway.tally import DISTRIBUTIONS


class Metrics(Collector):
    """`record` (a request is over) and `event` feed it; the Prometheus registry calls `collect`."""

    def __init__(
        self,
        classes: Iterable[str],
        version: str,
        gauges: Callable[[], Gauges] = Gauges,
        tenants: Iterable[str] = (),
    ) -> None:
        self.counted = Counted(classes, tenants)
        self.record, self.event = self.counted.record, self.counted.event
        self.gauges = gauges
        self._version = version

    def configure(self, classes: Iterable[str], tenants: Iterable[str]) -> None:
        """The names that labels may have from now on."""
        self.counted.configure(classes, tenants)

    # -- the page ----------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        g = self.gauges()
        self._forget_all_but(g.replicas.keys())
        info = InfoMetricFamily("forebay_build", "Version of the gateway.")
        info.add_metric([], {"version": self._version})
        yield info
        yield from self._of_requests()
        yield from self._of_attempts()
        yield from g.of_replicas()
        yield from g.of_gateway()

    def _of_requests(self) -> Iterator[Metric]:
        counted = self.counted
        tallies = counted.tallies.items()
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
            counted.by_tenant,
        )
        yield _counter("forebay_choices", "Dispatches by reason of the policy.", ("policy", "reason"), counted.choices)
        yield _counter(
            "forebay_policy_requests",
            "Requests by routing policy, arm of an experiment and partition.",
            ("policy", "arm", "partition"),
            counted.by_policy,
        )
        yield _counter("forebay_retries", "Attempts after the first of a request.", (), {(): counted.retries})
        retries: dict[tuple[str, ...], int] = {(): counted.client_retries}
        yield _counter("forebay_client_retries", "Requests that a client says are retries.", (), retries)

    def _forget_all_but(self, replicas: Collection[str]) -> None:
        """Attempts that end after their replica was removed must not bring its labels back. In the turn in which the
        fleet was looked at: who joins while the page is written is not gone."""
        counted = self.counted
        named = {key[0] for key in (*counted.attempts, *counted.ejections, *counted.returns, *counted.restarts)}
        for gone in (named | counted.precision.keys()).difference(replicas):
            counted.forget(gone)

    def _of_attempts(self) -> Iterator[Metric]:
        counted = self.counted
        yield _counter("forebay_attempts", "Attempts that ended.", ("replica", "outcome", "reason"), counted.attempts)
        yield _counter("forebay_ejections", "Times out of rotation.", ("replica", "reason"), counted.ejections)
        yield _counter("forebay_returns", "Returns to rotation.", ("replica",), counted.returns)
        yield _counter("forebay_restarts", "Restarts of a replica that were noticed.", ("replica",), counted.restarts)
        precision = GaugeMetricFamily(
            "forebay_prefix_precision", "Cached tokens confirmed over cached tokens expected.", labels=("replica",)
        )
        for id, (confirmed, believed) in counted.precision.items():
            precision.add_metric([id], confirmed / believed)
        yield precision


async def rendered(registry: Collector) -> bytes:
    """The page, a family a turn of the loop: all of it takes milliseconds, in which no stream would move."""
    parts = []
    for family in registry.collect():
        parts.append(generate_latest(_One(family)))
        await asyncio.sleep(0)
    return b"".join(parts)


class _One(Collector):
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def _counter(name: str, help_text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=labels)
    for key, count in values.items():
        family.add_metric(list(key), float(count))
    return family
