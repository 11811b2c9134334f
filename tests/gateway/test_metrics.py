"""The contract of /metrics: every series, its labels, and that no client can add one."""

from __future__ import annotations

import asyncio

from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from gateway.gauges import Gauges, ReplicaGauges
from gateway.metrics import Metrics, rendered
from gateway.record import Attempt, RequestRecord, Tokens, TokenSource
from policies.model import Ejected, Outcome, Prediction, Removed, Restarted, Returned
from policies.objectives import Partition

CLASSES = ("interactive", "standard", "batch")
STATE = Gauges(
    replicas={
        "a": ReplicaGauges(3, 500.0, 9000.0, True, "in", 0.6, 8000.0, 2.0, 1.0, 0.25, 0.4),
        "b": ReplicaGauges(phase="out"),
    },
    held_by_class={"interactive": 4},
    held_bytes=1000,
    oldest_wait_s=0.5,
    open_requests=7,
    margins={("interactive", "long"): 1.25},
    prediction_error=0.2,
    prediction_bias=-0.1,
    working_set_tokens=90_000,
    working_set_share=0.7,
    working_set_enforced=False,
    door_refusals={"loop_lag": 2, "receiving": 0},
    loop_lag_s=0.001,
    loop_lag_max_s=0.02,
    sources={"file": (2, 0.5, 0), "dns": (0, None, 3)},
    journal_written=5,
    journal_dropped=1,
    config_version=2,
    draining=False,
)


def finished(**changes: object) -> RequestRecord:
    record = RequestRecord(
        "r-1",
        received_at=100.0,
        service_class="interactive",
        policy="round_robin",
        choice_reason="turn",
        prompt=Tokens(300, TokenSource.USAGE),
        completion=Tokens(11, TokenSource.USAGE),
        cached=Tokens(128, TokenSource.USAGE),
        prediction=Prediction(ttft_s=0.25, cached_tokens=256),
        first_content_at=100.6,
        last_content_at=101.6,
        longest_gap_s=0.2,
        content_events=11,
        ended_at=101.7,
        outcome=Outcome.SUCCESS,
        partition=Partition.GOOD,
        attempts=[Attempt("a", 100.1, 100.6, Outcome.SUCCESS)],
    )
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def page(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    registry = CollectorRegistry()
    registry.register(metrics)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return page(metrics).get((name, tuple(sorted(labels.items()))))


def test_every_series_has_its_name_and_only_its_own_labels() -> None:
    metrics = Metrics(CLASSES, "0.1.0", lambda: STATE)
    metrics.record(finished(tenant="alice"))
    metrics.event(Ejected("a", "refused"))
    metrics.event(Returned("a", half_open=True))
    metrics.event(Restarted("a"))
    of_class = "service_class"
    histograms = ("ttft_seconds", "tpot_seconds", "longest_gap_seconds", "e2e_seconds", "queue_wait_seconds")
    expected: dict[str, set[str]] = {
        "forebay_build_info": {"version"},
        "forebay_requests_total": {of_class, "outcome", "reason"},
        "forebay_partitions_total": {of_class, "partition"},
        "forebay_tokens_total": {of_class, "kind", "source"},
        "forebay_tenant_requests_total": {"tenant", "outcome"},
        "forebay_choices_total": {"policy", "reason"},
        "forebay_policy_requests_total": {"policy", "arm", "partition"},
        "forebay_retries_total": set(),
        "forebay_client_retries_total": set(),
        "forebay_attempts_total": {"replica", "outcome", "reason"},
        "forebay_ejections_total": {"replica", "reason"},
        "forebay_returns_total": {"replica"},
        "forebay_restarts_total": {"replica"},
        "forebay_prefix_precision": {"replica"},
        "forebay_replica_phase": {"replica", "phase"},
        "forebay_held_requests": {of_class},
        "forebay_margin": {of_class, "predicted"},
        "forebay_prediction_error_ratio": set(),
        "forebay_prediction_bias_ratio": set(),
        "forebay_working_set_tokens": set(),
        "forebay_working_set_share": set(),
        "forebay_working_set_enforced": set(),
        "forebay_held_bytes": set(),
        "forebay_held_oldest_seconds": set(),
        "forebay_open_requests": set(),
        "forebay_capacity_factor": set(),
        "forebay_event_loop_lag_seconds": set(),
        "forebay_event_loop_lag_max_seconds": set(),
        "forebay_overloaded": set(),
        "forebay_receiving_bytes": set(),
        "forebay_door_refusals_total": {"of"},
        "forebay_config_version": set(),
        "forebay_config_refused_total": set(),
        "forebay_discovery_members": {"source"},
        "forebay_discovery_age_seconds": {"source"},
        "forebay_discovery_failures_total": {"source"},
        "forebay_draining": set(),
        "forebay_journal_lines_total": set(),
        "forebay_journal_dropped_total": set(),
    }
    for name in (*histograms, "ttft_prediction_ratio"):
        expected[f"forebay_{name}_bucket"] = {of_class, "le"}
        expected[f"forebay_{name}_count"] = expected[f"forebay_{name}_sum"] = {of_class}
    for name in (
        "in_flight",
        "prefill_backlog_tokens",
        "kv_headroom_tokens",
        "available",
        "pacing_rate",
        "prefill_rate_tokens_per_second",
        "engine_running",
        "engine_waiting",
        "engine_kv_usage",
        "scrape_age_seconds",
    ):
        expected[f"forebay_replica_{name}"] = {"replica"}
    seen: dict[str, set[str]] = {}
    for name, labels in page(metrics):
        seen.setdefault(name, set()).update(key for key, _ in labels)
    assert seen == expected


def test_a_request_is_counted_once_with_its_times() -> None:
    metrics = Metrics(CLASSES, "0.1.0")
    metrics.record(finished())
    assert value(metrics, "forebay_requests_total", service_class="interactive", outcome="success", reason="") == 1
    assert value(metrics, "forebay_partitions_total", service_class="interactive", partition="good") == 1
    assert value(metrics, "forebay_ttft_seconds_bucket", service_class="interactive", le="0.5") == 0
    assert value(metrics, "forebay_ttft_seconds_bucket", service_class="interactive", le="0.75") == 1
    assert round(value(metrics, "forebay_ttft_seconds_sum", service_class="interactive") or 0, 6) == 0.6
    assert value(metrics, "forebay_tpot_seconds_bucket", service_class="interactive", le="0.125") == 1
    assert value(metrics, "forebay_queue_wait_seconds_count", service_class="interactive") == 1
    assert value(metrics, "forebay_tokens_total", service_class="interactive", kind="cached", source="usage") == 128
    assert round(value(metrics, "forebay_ttft_prediction_ratio_sum", service_class="interactive") or 0, 6) == 2.0


def test_a_shed_request_has_a_reason_and_no_latency() -> None:
    metrics = Metrics(CLASSES, "0.1.0")
    shed = {"first_content_at": None, "last_content_at": None, "attempts": [], "prediction": None}
    metrics.record(finished(outcome=Outcome.SHED, partition=Partition.REJECTED, reason="infeasible", **shed))
    labels = {"service_class": "interactive", "outcome": "shed", "reason": "infeasible"}
    assert value(metrics, "forebay_requests_total", **labels) == 1
    assert value(metrics, "forebay_ttft_seconds_count", service_class="interactive") == 0
    assert value(metrics, "forebay_queue_wait_seconds_count", service_class="interactive") == 0


def test_retries_are_the_attempts_after_the_first() -> None:
    metrics = Metrics(CLASSES, "0.1.0", lambda: STATE)
    first = Attempt("b", 100.0, None, Outcome.ERROR, "refused")
    metrics.record(finished(attempts=[first, Attempt("a", 100.1, 100.6, Outcome.SUCCESS)]))
    assert value(metrics, "forebay_retries_total") == 1
    assert value(metrics, "forebay_attempts_total", replica="b", outcome="error", reason="refused") == 1


def test_requests_are_counted_by_tenant_of_the_configuration() -> None:
    metrics = Metrics(CLASSES, "0.1.0", tenants=["alice"])
    for tenant in ("alice", "alice", "gone", None):
        metrics.record(finished(tenant=tenant))
    assert value(metrics, "forebay_tenant_requests_total", tenant="alice", outcome="success") == 2.0
    assert value(metrics, "forebay_tenant_requests_total", tenant="other", outcome="success") == 1.0


def test_whatever_clients_send_there_is_never_a_new_series() -> None:
    metrics = Metrics(CLASSES, "0.1.0", lambda: STATE)
    metrics.record(finished(service_class="other", reason="other", tenant="other"))
    metrics.record(finished(service_class="x", reason="x", choice_reason="x"))
    before = set(page(metrics))
    for i in range(50):
        metrics.record(
            finished(
                service_class=f"class-{i}",
                reason=f"reason-{i}",
                model=f"m-{i}",
                tenant=f"t-{i}",
                endpoint=f"/{i}",
                choice_reason=f"choice-{i}",
                session=f"s-{i}",
            )
        )
    assert set(page(metrics)) == before


def test_precision_is_what_was_confirmed_of_what_was_believed() -> None:
    metrics = Metrics(CLASSES, "0.1.0", lambda: STATE)
    metrics.record(finished())
    assert value(metrics, "forebay_prefix_precision", replica="a") == 0.5
    metrics.record(finished(cached=Tokens(256, TokenSource.ESTIMATE)))  # an estimate confirms nothing
    assert value(metrics, "forebay_prefix_precision", replica="a") == 0.5


def test_labels_of_a_removed_replica_vanish_and_late_news_do_not_bring_them_back() -> None:
    state = Gauges(replicas=dict(STATE.replicas))
    metrics = Metrics(CLASSES, "0.1.0", lambda: state)
    metrics.record(finished())
    metrics.event(Ejected("a", "refused"))
    del state.replicas["a"]
    metrics.event(Removed("a"))
    metrics.record(finished())
    assert [name for name, labels in page(metrics) if ("replica", "a") in labels] == []


def test_a_replica_that_joins_while_a_page_is_written_loses_none_of_its_counts() -> None:
    fleet: dict[str, ReplicaGauges] = {}
    metrics = Metrics(CLASSES, "0.1.0", lambda: Gauges(replicas=dict(fleet)))
    being_written = iter(metrics.collect())
    next(being_written)
    fleet["a"] = STATE.replicas["a"]
    metrics.record(finished())
    metrics.event(Ejected("a", "refused"))
    assert len(list(being_written)) > 40
    assert value(metrics, "forebay_attempts_total", replica="a", outcome="success", reason="") == 1
    assert value(metrics, "forebay_ejections_total", replica="a", reason="refused") == 1


def test_unknown_values_are_left_out_and_not_zero() -> None:
    metrics = Metrics(CLASSES, "0.1.0", lambda: STATE)
    assert value(metrics, "forebay_replica_kv_headroom_tokens", replica="a") == 9000
    assert value(metrics, "forebay_replica_kv_headroom_tokens", replica="b") is None
    assert value(metrics, "forebay_replica_available", replica="b") == 0


async def test_a_page_is_rendered_a_family_a_turn_and_is_the_page_all_the_same() -> None:
    registry = CollectorRegistry()
    registry.register(Metrics(["standard"], "1.0"))
    turns, over = 0, False

    async def count() -> None:
        nonlocal turns
        while not over:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    text = await rendered(registry)
    over = True
    await counting
    assert text == generate_latest(registry)
    assert turns >= len(list(registry.collect())) > 40
