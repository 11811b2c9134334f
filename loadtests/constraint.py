"""What held a run back, named with its evidence and the one setting to try next.

Rules are asked in order and the first that holds is the answer, because each makes the ones behind it unreadable: a
late generator, failing servers, a late gateway, preemption, prompts computed that were cached elsewhere, prefills that
stretch decodes, waiting inside the engine, the host, the gateway's own holding. Only when none holds is it the
accelerator: more GPUs are the last advice. Thresholds are judgement, stated beside each rule; they are not measured
constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.errors import OVERLOADED
from loadtests.engine_watch import Totals
from loadtests.split import Split

Run = Mapping[str, Any]
ERRORS = ("error_http", "error_transport", "truncated")


@dataclass(slots=True, frozen=True)
class Finding:
    name: str  # generator | failures | kv_cache | prefix_cache | prefill_interference | engine_queue | host | ...
    evidence: str
    try_next: str


def constraint(run: Run, split: Split, engine: Totals) -> Finding:
    """Of one run: its entry in summary.json, the mean split of its answers, and what the replicas' metrics gained."""
    return next(found for rule in RULES if (found := rule(run, split, engine)) is not None)


def _generator(run: Run, split: Split, engine: Totals) -> Finding | None:
    if run.get("verdict") != "invalid":
        return None
    return Finding(
        "generator",
        "; ".join(run["reasons"]),
        "--workers, or a quieter machine: nothing else can be read from this run",
    )


def _failures(run: Run, split: Split, engine: Totals) -> Finding | None:
    rate = run.get("error_rate") or 0.0  # above 1 %
    if rate <= 0.01:
        return None
    reasons = run.get("reasons_by_outcome") or {}
    worst = max(
        (
            (sum(counts.values()), outcome, max(counts, key=lambda r: counts[r]))
            for outcome, counts in reasons.items()
            if outcome in ERRORS and counts
        ),
        default=(0, "errors", "unknown"),
    )
    return Finding(
        "failures",
        f"{rate:.1%} of requests failed, mostly {worst[1]}: {worst[2]}",
        "the replicas' logs and `/admin/fleet` of the gateway, before any tuning",
    )


def _gateway(run: Run, split: Split, engine: Totals) -> Finding | None:
    late = sum(one["count"] for one in run.get("top_errors") or () if one["message"] == OVERLOADED)
    if late <= 0.01 * run["offered"]:
        return None
    return Finding(
        "gateway",
        f"{late} of {run['offered']} requests were refused because the gateway's own event loop ran late",
        "workers.count = 2 or more, or a core that nothing else runs on",
    )


def _kv_cache(run: Run, split: Split, engine: Totals) -> Finding | None:
    preemptions = engine.get("preemptions", run.get("preemptions") or 0.0)
    if preemptions <= 0.01 * max(1, run["offered"]):  # above one in a hundred requests
        return None
    return Finding(
        "kv_cache",
        f"{preemptions:.0f} preemptions in {run['offered']} requests: what was computed is "
        "thrown away and computed again",
        "kv.limit_share, lower by 0.1 (then --kv-cache-dtype fp8)",
    )


def _prefix_cache(run: Run, split: Split, engine: Totals) -> Finding | None:
    reuse = run.get("reuse") or {}
    achieved, ceiling = reuse.get("achieved"), reuse.get("ceiling")
    if achieved is None or not ceiling or ceiling < 0.1 or achieved >= 0.75 * ceiling:  # a quarter of it is lost
        return None
    waits = split.prefill + split.engine_queue + split.gateway_queue + split.undivided
    if waits < 0.3 * (split.total - split.decode):
        return None
    if run["policy"].split("+")[0] in ("round_robin", "random", "least_request", "power_of_two"):
        try_next = 'policy.name = "forebay": this policy does not look at what is cached where'
    else:
        try_next = "working_set.share, lower by 0.1: conversations are evicted before their next turn"
    return Finding(
        "prefix_cache",
        f"{achieved:.0%} of prompt tokens came from a cache, {ceiling:.0%} could have; "
        f"prefill and waiting take {waits:.2f} s of a request",
        try_next,
    )


def _prefill_interference(run: Run, split: Split, engine: Totals) -> Finding | None:
    slow = (run.get("outcomes") or {}).get("slow_tpot", 0) + (run.get("outcomes") or {}).get("slow_itl", 0)
    tpot = run.get("tpot_s") or {}
    p50, p99 = tpot.get("p50"), tpot.get("p99")
    if not p50 or not p99 or p99 < 2.0 * p50 or slow < 0.05 * run["offered"]:  # a tail twice the median
        return None
    return Finding(
        "prefill_interference",
        f"{slow} of {run['offered']} answers were too slow per token; TPOT p99 "
        f"{p99 * 1e3:.0f} ms against p50 {p50 * 1e3:.0f} ms: prefills stretch the steps of others",
        "pacing.enabled = true (policy forebay has it on), then vLLM's --max-num-batched-tokens, halved",
    )


def _engine_queue(run: Run, split: Split, engine: Totals) -> Finding | None:
    if split.engine_queue < 0.25 * (split.total - split.decode):  # a quarter of the way to the first token
        return None
    return Finding(
        "engine_queue",
        f"{split.engine_queue:.2f} s of a request pass in the engine's own queue, where "
        "nothing can be reordered or refused",
        "admission.enabled = true, or admission.backlog_s halved",
    )


def _host(run: Run, split: Split, engine: Totals) -> Finding | None:
    if split.transport < 0.25 * split.total:  # a quarter of everything
        return None
    return Finding(
        "host",
        f"{split.transport:.2f} s of a request are neither queue, prefill nor decode: network, "
        "API server or gateway process",
        "the CPU of API server and gateway, then vLLM's --api-server-count",
    )


def _admission(run: Run, split: Split, engine: Totals) -> Finding | None:
    shed = run.get("shed", 0) / max(1, run["offered"])
    held = split.gateway_queue / split.total if split.total > 0 else 0.0
    if shed <= 0.05 and held < 0.25:
        return None
    return Finding(
        "admission",
        f"{shed:.1%} of requests were refused and {split.gateway_queue:.2f} s of an answered "
        "one were held: more is asked than can meet its objectives",
        "the class objectives (looser where users would not notice), then more replicas",
    )


def _accelerator(run: Run, split: Split, engine: Totals) -> Finding:
    part = "decode" if split.decode >= split.prefill + split.undivided else "prefill"
    share = split.shares()["decode"] if part == "decode" else 1.0 - split.shares()["decode"]
    if (run.get("attainment") or 0.0) >= 0.95:
        return Finding(
            "none",
            f"{run['attainment']:.1%} of requests meet their objectives; {part} takes {share:.0%} of a request",
            "nothing: this load is carried",
        )
    if run.get("attainment") is None and not engine.get("waiting"):  # live traffic, whose objectives nobody knows
        return Finding(
            "none",
            f"nobody waits at the replicas; {part} takes {share:.0%} of a request",
            "nothing that could be seen from here",
        )
    return Finding(
        "accelerator",
        f"{part} takes {share:.0%} of a request, caches and queues are in order",
        "quantisation or a smaller model if answers allow it; then more replicas",
    )


Rule = Callable[[Run, Split, Totals], Finding | None]
RULES: tuple[Rule, ...] = (
    _generator,
    _failures,
    _gateway,
    _kv_cache,
    _prefix_cache,
    _prefill_interference,
    _engine_queue,
    _host,
    _admission,
    _accelerator,
)
