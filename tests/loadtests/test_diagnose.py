"""Where the time went: parts that sum, constraints from literal runs, and the command on a folder."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtests import cli, demo, engine_watch
from loadtests.constraint import constraint
from loadtests.diagnose import cache_line, cost_line
from loadtests.playground import Playground
from loadtests.split import Split, mean, split
from tests.loadtests.test_report import folder

CAPTURES = Path(__file__).resolve().parent.parent / "captures"
ROW = {"scheduled_s": 1.0, "dispatched_s": 1.1, "first_s": 3.0, "last_s": 5.0, "end_s": 5.1, "queue_s": 0.4}


def run(**more: object) -> dict[str, object]:
    return {
        "policy": "forebay", "verdict": "valid", "reasons": [], "offered": 100, "shed": 0, "error_rate": 0.0,
        "attainment": 0.8, "outcomes": {}, "reuse": {"achieved": 0.6, "ceiling": 0.65},
        "tpot_s": {"p50": 0.02, "p99": 0.03},
    } | more  # fmt: skip


def test_the_parts_of_a_request_sum_to_its_end_to_end_time() -> None:
    found = split(ROW, {"queue_sum_s": 30.0, "queue_count": 100.0, "prefill_sum_s": 60.0, "prefill_count": 100.0})
    assert found is not None
    assert math.isclose(found.total, 4.1)
    assert found.client_lag == pytest.approx(0.1)
    assert (found.gateway_queue, found.engine_queue, found.prefill, found.decode) == (0.4, 0.3, 0.6, 2.0)
    assert found.transport == pytest.approx(0.7)  # 1.5 s to the first token less 0.9, and 0.1 at the end


def test_a_requests_own_figures_come_before_the_fleets_means() -> None:
    own = ROW | {"engine": {"time_to_first_token_ms": 1_400.0, "queue_time_ms": 200.0}}
    found = split(own, {"queue_sum_s": 900.0, "queue_count": 1.0})
    assert found is not None
    assert (found.engine_queue, found.prefill) == (pytest.approx(0.2), pytest.approx(1.2))


def test_means_larger_than_the_request_are_scaled_into_it() -> None:
    found = split(ROW, {"queue_sum_s": 6.0, "queue_count": 1.0, "prefill_sum_s": 3.0, "prefill_count": 1.0})
    assert found is not None
    assert (found.engine_queue, found.prefill) == (pytest.approx(1.0), pytest.approx(0.5))
    assert math.isclose(found.total, 4.1)


def test_an_answer_without_times_has_no_split() -> None:
    assert split({**ROW, "first_s": None}, {}) is None
    assert mean([]).total == 0.0


SPLIT = Split(0.0, 0.1, 0.05, 0.3, 2.0, 0.05)


@pytest.mark.parametrize(("name", "more", "parts", "engine", "says"), [
    ("generator", {"verdict": "invalid", "reasons": ["lag p99 80 ms"]}, SPLIT, {}, "--workers"),
    ("failures", {"error_rate": 0.05, "reasons_by_outcome": {"truncated": {"connection_cut": 5}}}, SPLIT, {},
     "the replicas' logs"),
    ("gateway", {"shed": 20, "top_errors": [{"count": 20, "message": "the gateway itself is overloaded"}]}, SPLIT, {},
     "workers.count"),
    ("kv_cache", {}, SPLIT, {"preemptions": 40.0}, "kv.limit_share"),
    ("prefix_cache", {"policy": "round_robin", "reuse": {"achieved": 0.1, "ceiling": 0.7}}, SPLIT, {},
     'policy.name = "forebay"'),
    ("prefix_cache", {"reuse": {"achieved": 0.1, "ceiling": 0.7}}, SPLIT, {}, "working_set.share"),
    ("prefill_interference", {"tpot_s": {"p50": 0.02, "p99": 0.2}, "outcomes": {"slow_tpot": 30}}, SPLIT, {},
     "pacing.enabled"),
    ("engine_queue", {}, Split(0.0, 0.1, 2.0, 0.3, 2.0, 0.05), {}, "admission.backlog_s"),
    ("host", {}, Split(0.0, 0.0, 0.0, 0.3, 1.0, 2.0), {}, "--api-server-count"),
    ("admission", {"shed": 30}, SPLIT, {}, "the class objectives"),
    ("accelerator", {}, SPLIT, {}, "then more replicas"),
    ("none", {"attainment": 0.99}, SPLIT, {}, "this load is carried"),
    ("none", {"attainment": None}, SPLIT, {"waiting": 0.0}, "could be seen from here"),
    ("accelerator", {"attainment": None}, SPLIT, {"waiting": 3.0}, "then more replicas"),
])  # fmt: skip
def test_the_constraint_is_named_with_the_one_setting_to_try(
    name: str, more: dict[str, object], parts: Split, engine: dict[str, float], says: str
) -> None:
    found = constraint(run(**more), parts, engine)
    assert found.name == name
    assert says in found.try_next


def test_more_gpus_are_never_the_first_advice() -> None:
    for shed in (0, 30):
        advice = constraint(run(shed=shed), SPLIT, {}).try_next
        assert not advice.startswith("more replicas")


def test_totals_are_read_from_recorded_metrics_and_restarts_do_not_go_below_zero() -> None:
    found = engine_watch.read((CAPTURES / "metrics-sample.txt").read_text())
    assert found["steps"] > 0
    assert engine_watch.gained({"u": {"steps": 100.0}}, {"u": {"steps": 130.0}}) == {"steps": 30.0}
    assert engine_watch.gained({"u": {"steps": 100.0}}, {"u": {"steps": 7.0}}) == {"steps": 7.0}
    assert engine_watch.gained({}, {"new": {"steps": 7.0}}) == {}


METRICS = """\
vllm:prefix_cache_queries_total{engine="0",model_name="m"} %d
vllm:prefix_cache_hits_total{engine="0",model_name="m"} %d
vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} %d
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} %d
"""


def test_what_an_external_cache_gave_is_told_apart_from_the_replicas_own() -> None:
    before = {"a": engine_watch.read(METRICS % (100, 50, 50, 0)), "b": engine_watch.read(METRICS % (0, 0, 0, 0))}
    after = {
        "a": engine_watch.read(METRICS % (700, 350, 350, 60)),
        "b": engine_watch.read(METRICS % (400, 100, 300, 40)),
    }
    caches = engine_watch.by_cache(engine_watch.gained(before, after))
    assert caches == {"own_cache": 0.4, "external_cache": 0.1}
    assert cache_line(caches) == "prompt tokens: 40.0% from own cache, 10.0% from external cache"
    assert engine_watch.by_cache({}) == {}


def test_cost_of_a_thousand_good_requests() -> None:
    runs = [{"verdict": "valid", "good": 500, "window_s": 60.0, "drain_s": 12.0, "per_replica": {"a": {}, "b": {}}}]
    # 2 GPUs x 3.00 x 72 s / 3600 / 500 x 1000
    assert cost_line(runs, 3.0, None) == "cost: 0.240 per 1,000 good requests (2 GPUs at 3 an hour, drain included)"
    assert "--gpus" in cost_line([runs[0] | {"good": 0}], 3.0, None)


def test_the_command_on_a_folder(tmp_path: Path) -> None:
    made = folder(tmp_path, loads=(1.0,))
    result = CliRunner().invoke(cli.build(["diagnose"]), ["diagnose", str(made), "--gpu-hour-price", "2"])
    assert result.exit_code == 0, result.output
    assert "constraint: prefix_cache" in result.output  # its records hit far less than their schedule allows
    assert "per 1,000 good requests" in result.output


def test_live_traffic_of_a_gateway_without_any_says_so() -> None:
    with Playground(demo.replica_settings(), 1) as ground:
        result = CliRunner().invoke(cli.build(["diagnose"]), ["diagnose", "--url", ground.url, "--for", "1"])
    assert result.exit_code == 2
    assert "no request finished at 1 replicas" in result.stderr


def test_bad_usage_is_named() -> None:
    result = CliRunner().invoke(cli.build(["diagnose"]), ["diagnose"])
    assert (result.exit_code, "either a result folder or --url URL" in result.stderr) == (2, True)
    gone = CliRunner().invoke(cli.build(["diagnose"]), ["diagnose", "--url", "http://127.0.0.1:9/"])
    assert gone.exit_code == 2
    assert gone.stderr.startswith("forebay diagnose: --url http://127.0.0.1:9: no gateway answers: ")
