"""What one run scored, and the files of a result folder: summary.json, requests.jsonl, schedules.

Every run has one schedule (its cohort is the denominator) and one record per row. `ttft_s` and its like are over
complete answers; `ttft_offered_s` is over the whole cohort with the rest at infinity (null in JSON), so that a policy
which drops its slow requests cannot look faster. Percentiles are per run and per bucket, never averaged. `runs` holds
nothing that differs between two equal executions: wall time, host and command line go to `provenance`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtests.record import Record
from loadtests.schedule import Schedule
from policies.objectives import LATE, Partition
from policies.statistics import INFINITE, Percentiles, attainment, goodput_rps, percentiles, wilson

SCHEMA = "forebay.results/1"
BUCKETS: tuple[tuple[str, int], ...] = (("to_1k", 1_000), ("1k_4k", 4_000), ("4k_16k", 16_000), ("16k_64k", 64_000))
LAST_BUCKET = "above_64k"
BIN_S = 5.0
EVEN_IDLE = "infeasible_even_idle"  # refused for an objective that no idle replica could have met
HARSH_SHEDDING = 0.4  # above this average share the fairness bound is about attainment instead
LEAST_OF_BEST = 0.3


class OutError(ValueError):
    """What was asked for cannot be written where it was asked for; told before a run, not after it."""


def ready(out: Path) -> Path:
    """The folder of --out, made where it is not there. Raises OutError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise OutError(f"--out {out}: a file is there; a folder would be right") from None
    except OSError as error:
        raise OutError(f"--out {out}: cannot be made: {error.strerror}") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise OutError(f"--out {out}: nothing can be written there; a folder of your own would be right")
    return out


def ready_file(out: Path) -> Path:
    """The file of --out, which may be there already. Raises OutError."""
    if out.is_dir():
        raise OutError(f"--out {out}: is a folder; the path of a file would be right")
    if not out.parent.is_dir():
        raise OutError(f"--out {out}: there is no folder {out.parent}; make it, or name a file in one that is there")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise OutError(f"--out {out}: cannot be written there; a file of your own would be right")
    return out


class ConservationError(RuntimeError):
    """A run whose books do not balance; its text says which. Always a defect of the harness or the gateway."""


def bucket(prompt_tokens: int) -> str:
    """Prompt-length bucket; objectives and percentiles of different buckets do not mix."""
    for name, bound in BUCKETS:
        if prompt_tokens <= bound:
            return name
    return LAST_BUCKET


def summarise(
    schedule: Schedule,
    records: Sequence[Record],
    policy: str,
    verdict: str = "valid",
    reasons: Sequence[str] = (),
    size_fairness: float = 2.0,
) -> dict[str, Any]:
    """The entry of one run in `runs`. `records` has one per schedule row. Raises ConservationError if not."""
    cohort = cohort_of(schedule, records)
    good = sum(r.partition is Partition.GOOD for r in cohort)
    outcomes = {p.value: sum(r.partition is p for r in cohort) for p in Partition}
    if sum(outcomes.values()) != len(cohort):
        raise ConservationError(f"partition sums to {sum(outcomes.values())} of {len(cohort)} offered")
    share = wilson(good, len(cohort))
    span = schedule.window_s + schedule.drain_s
    complete = [r for r in cohort if r.complete]
    reported = [r for r in cohort if r.cached_tokens is not None]
    prompt = sum(r.prompt_tokens for r in reported)
    tenant = {row.id: row.tenant for row in schedule.cohort if row.tenant is not None}
    tenants = sorted(set(tenant.values()))
    good_prompt = sum(r.prompt_tokens for r in cohort if r.partition is Partition.GOOD)
    return {
        "policy": policy,
        "load": schedule.recipe.load,
        "seed": schedule.recipe.seed,
        "verdict": verdict,
        "reasons": list(reasons),
        "schedule_sha256": schedule.sha256,
        "window_s": schedule.window_s,
        "drain_s": schedule.drain_s,
        "offered": len(cohort),
        "offered_rps": len(cohort) / schedule.window_s,
        "good": good,
        "goodput_rps": goodput_rps(good, schedule.window_s, schedule.drain_s),
        "goodput_kind": "latency-qualified",
        "good_per_window_rps": good / schedule.window_s,
        "attainment": attainment(good, len(cohort)),
        "attainment_wilson95": [share.low, share.high],
        "shed": outcomes[Partition.REJECTED.value],
        "shed_reasons": _counts(r.reason for r in cohort if r.partition is Partition.REJECTED),
        "late_complete": sum(r.complete and r.partition in LATE for r in cohort),
        "complete": len(complete),
        "complete_rps": len(complete) / span,
        "completed_in_window": sum(r.complete and (r.end_s or 0.0) <= schedule.window_s for r in cohort),
        "outcomes": outcomes,
        "output_tokens_per_s": sum(r.completion_tokens or 0 for r in complete) / span,
        "good_prompt_tokens_per_s": good_prompt / span,
        "ttft_s": _spread(r.ttft_s for r in complete),
        "tpot_s": _spread(r.tpot_s for r in complete),
        "e2e_s": _spread(r.e2e_s for r in complete),
        "longest_gap_s": _spread(r.longest_gap_s for r in complete),
        "queue_s": _spread(r.queue_s for r in complete),
        "ttft_offered_s": _spread(r.ttft_s if r.complete and r.ttft_s is not None else INFINITE for r in cohort),
        "by_bucket": {b: _part([r for r in cohort if bucket(r.prompt_tokens) == b]) for b in _buckets(cohort)},
        "by_class": {c: _part([r for r in cohort if r.service_class == c]) for c in _classes(cohort)},
        "by_tenant": {t: _part([r for r in cohort if tenant.get(r.id) == t]) for t in tenants},
        "cached_share": sum(r.cached_tokens or 0 for r in reported) / prompt if prompt else None,
        "attempts": sum(r.attempts for r in cohort),
        "wasted_tokens": sum(r.wasted_tokens for r in records),
        "fairness": fairness(cohort, size_fairness),
        "per_replica": per_replica(records),
        "timeline": timeline(schedule, records),
    }


def cohort_of(schedule: Schedule, records: Sequence[Record]) -> list[Record]:
    """The counted records, checked against the schedule."""
    if len(records) != len(schedule.rows):
        raise ConservationError(f"{len(records)} records for {len(schedule.rows)} rows of the schedule")
    by_id = {r.id: r for r in records}
    if len(by_id) != len(records):
        raise ConservationError(f"{len(records) - len(by_id)} records share an id with another")
    try:
        return [by_id[row.id] for row in schedule.cohort]
    except KeyError as error:
        raise ConservationError(f"row {error.args[0]} of the cohort has no record") from error


def fairness(cohort: Sequence[Record], bound: float) -> dict[str, Any]:
    """Shedding and attainment by quartile of prompt length, and whether the bound on them holds.

    No quartile shed more than `bound` times the average; above 40 % average shedding instead no quartile's attainment
    below 0.3 of the best one's. What not even an idle fleet could have served in time was refused for its objective,
    not for the sake of others, and is counted apart (`even_idle`).
    """
    even_idle = sum(r.reason == EVEN_IDLE for r in cohort)
    ordered = sorted((r for r in cohort if r.reason != EVEN_IDLE), key=lambda r: (r.prompt_tokens, r.id))
    quarters = [ordered[len(ordered) * i // 4 : len(ordered) * (i + 1) // 4] for i in range(4)]
    shed = [_share(q, Partition.REJECTED) for q in quarters]
    good = [_share(q, Partition.GOOD) for q in quarters]
    average = _share(ordered, Partition.REJECTED)
    if average > HARSH_SHEDDING:
        holds = min(good) >= LEAST_OF_BEST * max(good)
    else:
        # one request more than the bound allows is rounding, not unfairness
        slack = 1.0 / max(1, len(quarters[0]))
        holds = max(shed) <= bound * average + slack
    return {
        "longest_prompt": [q[-1].prompt_tokens if q else None for q in quarters],
        "shed_share": shed,
        "attainment": good,
        "bound": None if math.isinf(bound) else bound,
        "even_idle": even_idle,
        "holds": holds,
    }


def per_replica(records: Iterable[Record]) -> dict[str, dict[str, int]]:
    """What each replica answered: requests, prompt and output tokens, cached tokens."""
    out: dict[str, dict[str, int]] = {}
    for r in records:
        if r.replica is None:
            continue
        entry = out.setdefault(
            r.replica, {"requests": 0, "good": 0, "prompt_tokens": 0, "output_tokens": 0, "cached": 0}
        )
        entry["requests"] += 1
        entry["good"] += r.partition is Partition.GOOD
        entry["prompt_tokens"] += r.prompt_tokens
        entry["output_tokens"] += r.completion_tokens or 0
        entry["cached"] += r.cached_tokens or 0
    return dict(sorted(out.items()))


def imbalance(replicas: Mapping[str, Mapping[str, int]], fleet_size: int) -> float | None:
    """Largest share of uncached prompt tokens on one replica times the number of replicas; 1 is even."""
    work = [v["prompt_tokens"] - v["cached"] for v in replicas.values()]
    return max(work) * fleet_size / sum(work) if work and sum(work) > 0 else None


def timeline(schedule: Schedule, records: Sequence[Record]) -> dict[str, Any]:
    """Columns of equal length over bins of BIN_S from 0 to W + D, by scheduled time; `completed` by its end."""
    bins = math.ceil((schedule.window_s + schedule.drain_s) / BIN_S)
    columns = {name: [0] * bins for name in ("offered", "good", "shed", "completed", "open")}
    for r in records:
        if r.scheduled_s is None or r.scheduled_s < 0:
            continue
        at = int(r.scheduled_s / BIN_S)
        if at >= bins:
            continue
        columns["offered"][at] += 1
        columns["good"][at] += r.partition is Partition.GOOD
        columns["shed"][at] += r.partition is Partition.REJECTED
        end = bins - 1 if r.end_s is None else min(bins - 1, int(max(r.end_s, r.scheduled_s) / BIN_S))
        if r.complete:
            columns["completed"][end] += 1
        for i in range(at, end + 1 if r.end_s is None else end):
            columns["open"][i] += 1
    return {"bin_s": BIN_S, **columns}


def write(
    out: Path,
    runs: Sequence[Mapping[str, Any]],
    provenance: Mapping[str, Any],
    comparisons: Sequence[Mapping[str, Any]] = (),
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """summary.json of a folder. Numbers that JSON cannot hold become null."""
    out.mkdir(parents=True, exist_ok=True)
    summary = {"schema": SCHEMA, "runs": list(runs), "comparisons": list(comparisons), **(extra or {})}
    path = out / "summary.json"
    path.write_text(json.dumps(finite({**summary, "provenance": dict(provenance)}), indent=1, allow_nan=False) + "\n")
    return path


def line(record: Record, policy: str, load: float, seed: int) -> bytes:
    """One line of requests.jsonl; a run's rows are found by (policy, load, seed)."""
    value = {"policy": policy, "load": load, "seed": seed, **record.to_json()}
    return json.dumps(finite(value), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def read(out: Path) -> dict[str, Any]:
    """The summary of a folder. Raises ValueError when it is missing or of another schema."""
    path = out / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        first = f"run simulate, compare or replay with --out {out} first"
        raise ValueError(f"{path}: no summary of a run (file not found); {first}") from None
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no summary of a run ({error})") from error
    if summary.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema is {summary.get('schema')!r}; {SCHEMA!r} would be right")
    return summary


def finite(value: Any) -> Any:
    """The same value with infinities and NaN as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def _part(records: Sequence[Record]) -> dict[str, Any]:
    good = sum(r.partition is Partition.GOOD for r in records)
    complete = [r for r in records if r.complete]
    return {
        "offered": len(records),
        "good": good,
        "attainment": attainment(good, len(records)),
        "shed": sum(r.partition is Partition.REJECTED for r in records),
        "late_complete": sum(r.complete and r.partition in LATE for r in records),
        "ttft_s": _spread(r.ttft_s for r in complete),
        "tpot_s": _spread(r.tpot_s for r in complete),
        "e2e_s": _spread(r.e2e_s for r in complete),
    }


def _spread(values: Iterable[float | None]) -> dict[str, Any]:
    found: Percentiles = percentiles(v for v in values if v is not None)
    return asdict(found)


def _share(records: Sequence[Record], partition: Partition) -> float:
    return sum(r.partition is partition for r in records) / len(records) if records else 0.0


def _counts(values: Iterable[str]) -> dict[str, int]:
    out: dict[str, int] = {}
    for value in values:
        out[value] = out.get(value, 0) + 1
    return dict(sorted(out.items()))


def _buckets(records: Sequence[Record]) -> list[str]:
    held = {bucket(r.prompt_tokens) for r in records}
    return [b for b in (*(name for name, _ in BUCKETS), LAST_BUCKET) if b in held]


def _classes(records: Sequence[Record]) -> list[str]:
    return sorted({r.service_class for r in records})
