"""The state of the gateway at one scrape, and the series it becomes. Gathered by the composition root."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PER_REPLICA = (
    ("in_flight", "in_flight", "Requests dispatched and not finished."),
    ("prefill_backlog_tokens", "prefill_backlog_tokens", "Uncached tokens dispatched and not yet prefilled."),
    ("kv_headroom_tokens", "kv_headroom_tokens", "KV tokens free after what was dispatched."),
    ("available", "available", "1 when it may be dispatched to."),
    ("pacing_rate", "pacing_rate", "Share of time that may go to prefill."),
    ("prefill_rate", "prefill_rate_tokens_per_second", "Prefill speed as learnt."),
    ("running", "engine_running", "Requests running, as the engine said."),
    ("waiting", "engine_waiting", "Requests waiting, as the engine said."),
    ("kv_usage", "engine_kv_usage", "Share of KV blocks held, as the engine said."),
    ("scrape_age_s", "scrape_age_seconds", "Age of the engine's values."),
)


@dataclass(slots=True)
class ReplicaGauges:
    """What the core and the fleet know of one replica now; None is unknown and is not exported."""

    in_flight: int = 0
    prefill_backlog_tokens: float = 0.0
    kv_headroom_tokens: float | None = None
    available: bool = False
    phase: str = "starting"
    pacing_rate: float | None = None  # share of time that may go to prefill
    prefill_rate: float | None = None  # tokens/s
    running: float | None = None  # the engine's own gauges
    waiting: float | None = None
    kv_usage: float | None = None
    scrape_age_s: float | None = None


@dataclass(slots=True)
class Gauges:
    """The state of the gateway at one scrape, gathered by the composition root."""

    replicas: dict[str, ReplicaGauges] = field(default_factory=dict)
    held_by_class: dict[str, int] = field(default_factory=dict)
    held_bytes: int = 0
    oldest_wait_s: float = 0.0
    open_requests: int = 0
    margins: dict[tuple[str, str], float] = field(default_factory=dict)  # by class and predicted wait
    capacity_factor: float = 1.0
    prediction_error: float | None = None
    prediction_bias: float | None = None
    working_set_tokens: float | None = None
    working_set_share: float | None = None
    working_set_enforced: bool | None = None
    loop_lag_s: float = 0.0
    loop_lag_max_s: float = 0.0
    overloaded: bool = False
    receiving_bytes: int = 0
    door_refusals: dict[str, int] = field(default_factory=dict)  # by what was short
    sources: dict[str, tuple[int, float | None, int]] = field(default_factory=dict)  # members, age, failures
    journal_written: int = 0
    journal_dropped: int = 0
    config_version: int = 0
    config_refused: int = 0  # times that the file was read and refused
    draining: bool = False

    def of_replicas(self) -> Iterator[Metric]:
        for attribute, name, help_text in PER_REPLICA:
            family = GaugeMetricFamily(f"forebay_replica_{name}", help_text, labels=("replica",))
            for id, values in self.replicas.items():
                value = getattr(values, attribute)
                if value is not None:
                    family.add_metric([id], float(value))
            yield family
        phase = GaugeMetricFamily("forebay_replica_phase", "1 for the phase it is in.", labels=("replica", "phase"))
        for id, values in self.replicas.items():
            phase.add_metric([id, values.phase], 1.0)
        yield phase

    def of_gateway(self) -> Iterator[Metric]:
        held = GaugeMetricFamily("forebay_held_requests", "Requests held for dispatch.", labels=("service_class",))
        for name, count in self.held_by_class.items():
            held.add_metric([name], float(count))
        yield held
        margin = GaugeMetricFamily(
            "forebay_margin", "Factor on predictions, as learnt.", labels=("service_class", "predicted")
        )
        for key, factor in self.margins.items():
            margin.add_metric(list(key), factor)
        yield margin
        single: tuple[tuple[str, str, float | None], ...] = (
            ("held_bytes", "Bytes of bodies of held requests.", self.held_bytes),
            ("held_oldest_seconds", "Wait of the request held longest.", self.oldest_wait_s),
            ("capacity_factor", "Factor on the capacity that the paces give, as learnt.", self.capacity_factor),
            (
                "prediction_error_ratio",
                "Predicted against measured TTFT, mean size of the error.",
                self.prediction_error,
            ),
            ("prediction_bias_ratio", "The same with its sign.", self.prediction_bias),
            ("working_set_tokens", "Context of the conversations that are alive.", self.working_set_tokens),
            ("working_set_share", "Share of the KV capacity they may take, as learnt.", self.working_set_share),
            ("working_set_enforced", "1 while new conversations wait for room.", self.working_set_enforced),
            ("open_requests", "Requests received and not finished.", self.open_requests),
            ("event_loop_lag_seconds", "How late the event loop runs its timers, running mean.", self.loop_lag_s),
            ("event_loop_lag_max_seconds", "The same, worst since the last scrape.", self.loop_lag_max_s),
            ("overloaded", "1 while sheddable requests are refused because the event loop lags.", self.overloaded),
            ("receiving_bytes", "Bytes of request bodies that are on their way in.", self.receiving_bytes),
            ("config_version", "Number of configurations since start.", self.config_version),
            ("draining", "1 while the gateway shuts down.", self.draining),
        )
        for name, help_text, value in single:
            if value is not None:
                yield GaugeMetricFamily(f"forebay_{name}", help_text, value=float(value))
        refusals = CounterMetricFamily(
            "forebay_door_refusals",
            "Refused because the gateway itself was short of something.",
            labels=("of",),
        )
        for of, count in self.door_refusals.items():
            refusals.add_metric([of], float(count))
        yield refusals
        yield from self._of_sources()
        yield CounterMetricFamily(
            "forebay_config_refused", "Times that the file was read again and refused.", value=self.config_refused
        )
        yield CounterMetricFamily("forebay_journal_lines", "Journal lines written.", value=self.journal_written)
        yield CounterMetricFamily("forebay_journal_dropped", "Journal lines dropped.", value=self.journal_dropped)

    def _of_sources(self) -> Iterator[Metric]:
        members = GaugeMetricFamily("forebay_discovery_members", "Replicas that a source names.", labels=("source",))
        age = GaugeMetricFamily(
            "forebay_discovery_age_seconds", "Time since a source of replicas last answered.", labels=("source",)
        )
        failures = CounterMetricFamily(
            "forebay_discovery_failures", "Times that a source of replicas could not be read.", labels=("source",)
        )
        for name, (count, age_s, failed) in self.sources.items():
            members.add_metric([name], float(count))
            if age_s is not None:
                age.add_metric([name], age_s)
            failures.add_metric([name], float(failed))
        yield from (members, age, failures)
