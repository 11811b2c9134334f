"""The running experiment as Prometheus series; labels are arm names, which come from the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def series(results: Mapping[str, Any]) -> Iterator[Metric]:
    """From what `experiment_results.results` says."""
    labels = ("experiment", "arm")
    requests = CounterMetricFamily("forebay_experiment_requests", "Requests counted, by arm.", labels=(*labels, "good"))
    running = GaugeMetricFamily("forebay_experiment_running", "1 while the arm gets its traffic.", labels=labels)
    effect = GaugeMetricFamily("forebay_experiment_difference",
                               "Attainment of the arm minus the control's, with the bounds of its 95 % interval.",
                               labels=(*labels, "bound"))  # fmt: skip
    for arm in results["arms"]:
        name = (results["name"], arm["name"])
        requests.add_metric((*name, "yes"), arm["good"])
        requests.add_metric((*name, "no"), arm["requests"] - arm["good"])
        running.add_metric(name, float(arm["state"] == "running"))
        for bound, value in (arm["difference"] or {}).items():
            if bound in ("estimate", "low", "high") and value is not None:
                effect.add_metric((*name, bound), value)
    yield from (requests, running, effect)
