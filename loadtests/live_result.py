"""What only a live run knows, added to the numbers every run has: attempts, reuse against its ceiling, the generator.

`results.summarise` counts (partition, goodput, percentiles); this says whether it may be believed. A run whose
generator fell behind, or whose simulated replicas lagged their engine time, is invalid: its reasons are kept and it
has no goodput and no attainment, so that no table can quote it. With fixed concurrency only rows that were started
count, and the view is named response-paced: its number offered depends on the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from loadtests import results
from loadtests.gateways import RequestMaker
from loadtests.record import ERRORS, Record
from loadtests.reuse import ceiling
from loadtests.schedule import Schedule
from loadtests.sustain import SustainVerdict
from policies.objectives import Partition

MOST_ERRORS = 3  # different ones that are told


def summarise(
    schedule: Schedule,
    records: Sequence[Record],
    sustained: SustainVerdict,
    *,
    policy: str,
    replicas: int | None = None,
    more_reasons: Iterable[str] = (),
    response_paced: bool = False,
) -> dict[str, Any]:
    """One entry of `runs` in summary.json. Times in the schedule's seconds."""
    sha256, whole = schedule.sha256, schedule
    if response_paced:
        started = {r.id for r in records if r.counted}
        schedule = replace(schedule, rows=tuple(_started(row) for row in schedule.rows if row.id in started))
        records = [r for r in records if r.id in started]
    reasons = [*sustained.reasons, *more_reasons]
    run = results.summarise(schedule, records, policy, "invalid" if reasons else "valid", reasons)
    cohort = results.cohort_of(schedule, records)
    run |= {
        "schedule_sha256": sha256,
        "view": "response-paced" if response_paced else "open loop",
        "error_rate": sum(r.partition in ERRORS for r in cohort) / len(cohort) if cohort else None,
        "reasons_by_outcome": reasons_by_outcome(cohort),
        "top_errors": top_errors(cohort),
        "attempts": attempts(cohort),
        "reuse": reuse(whole, records, replicas),
        "sustained": sustained.to_json(),
    }
    if reasons:
        for name in ("good", "goodput_rps", "good_per_window_rps", "attainment", "attainment_wilson95"):
            run[name] = None
    return run


def _started(row: Any) -> Any:
    """A row as the response-paced view counts it: it belongs to the cohort because it was started."""
    return replace(row, at_s=0.0, session=None, turn=0)


def attempts(records: Sequence[Record]) -> dict[str, Any]:
    """Client attempts against logical requests, and what the attempts that failed had cost."""
    sent = sum(r.attempts for r in records)
    logical = sum(r.attempts > 0 for r in records)
    return {
        "logical": logical,
        "sent": sent,
        "amplification": sent / logical if logical else None,
        "wasted_tokens": sum(r.wasted_tokens for r in records),
    }


def reuse(schedule: Schedule, records: Sequence[Record], replicas: int | None) -> dict[str, Any]:
    """Cached share of prompt tokens as replicas report it, and what was to be had.

    Of all rows that were served, counted or not: the same population on both sides. Answers that report nothing are
    left out and counted.
    """
    known = [r for r in records if r.cached_tokens is not None and r.served_prompt_tokens]
    prompt = sum(r.served_prompt_tokens or 0 for r in known)
    cached = sum(r.cached_tokens or 0 for r in known)
    planned = sum(r.prompt_tokens for r in known)
    served = {r.id for r in known}
    rows = [row for row in schedule.rows if row.id in served]
    held = RequestMaker(schedule).held_after
    return {
        "achieved": cached / prompt if prompt else None,
        "cached_tokens": cached,
        "prompt_tokens": prompt,
        "not_reported": sum(r.complete and r.cached_tokens is None for r in records),
        "served_per_scheduled_token": prompt / planned if planned else None,
        "ceiling": ceiling(rows, schedule.block_tokens, held=held),
        "round_robin_ceiling": ceiling(rows, schedule.block_tokens, replicas, held=held) if replicas else None,
    }


def reasons_by_outcome(records: Sequence[Record]) -> dict[str, dict[str, int]]:
    """How often each reason stood behind each outcome; the part before a colon, the rest is detail."""
    found: dict[str, dict[str, int]] = {}
    for record in records:
        if record.reason:
            counts = found.setdefault(record.partition.value, {})
            reason = record.reason.split(":")[0]
            counts[reason] = counts.get(reason, 0) + 1
    return {name: dict(sorted(counts.items())) for name, counts in sorted(found.items())}


def top_errors(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The most frequent errors and refusals by status and reason, each with the first message that came with it."""
    found: dict[tuple[int | None, str], dict[str, Any]] = {}
    for record in records:
        if record.partition in ERRORS or record.partition is Partition.REJECTED:
            reason, _, detail = record.reason.partition(": ")
            said = record.message or detail or None
            one = found.setdefault(
                (record.http, reason), {"count": 0, "http": record.http, "reason": reason, "message": said}
            )
            one["count"] += 1
    return sorted(found.values(), key=lambda one: -int(one["count"]))[:MOST_ERRORS]
