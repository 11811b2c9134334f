"""What the prompt families add up to, as plain values for the admin API, the command line and the live page.

A split is reported as a leak when it was seen three times and costs a request at least 64 tokens; a change of text that
fits no kind must besides be in half of the family's requests and cost a tenth of its prompt, since texts that
differ are what prompts are made of.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from policies.families import QUANTITIES, Families, Family
from policies.leaks import LeakRow
from policies.volatile import ADVICE, Leak

LEAST_SAMPLES = 3
LEAST_TOKENS = 64.0
TEXT_SHARE, TEXT_LOSS = 0.5, 0.1
_TOKENS = QUANTITIES[1:]


def report(families: Families, now: float) -> dict[str, Any]:
    """Families with the most prompt tokens first, leaks with the most tokens lost first."""
    known = [f for f in families.families.values() if f.samples > 1]
    rows = sorted((family(f, now) for f in known), key=lambda row: -float(row["prompt_tokens_per_hour"]))
    found = [leak(f, row, now) for f in known for row in f.leaks.values() if leaks(f, row)]
    return {
        "families": rows,
        "leaks": sorted(found, key=lambda row: -float(row["lost_tokens_per_hour"])),
        "strata": len(families.strata),
        "samples": families.samples,
    }


def leaks(family: Family, row: LeakRow) -> bool:
    """Whether a split is worth telling."""
    requests, lost, _ = row.flow.sums
    if row.samples < LEAST_SAMPLES or requests <= 0 or lost < LEAST_TOKENS * requests:
        return False
    if row.kind is not Leak.TEXT:
        return True
    seen, prompt = family.flow.sums[:2]
    return requests >= TEXT_SHARE * seen and seen > 0 and lost / requests >= TEXT_LOSS * prompt / seen


def family(family: Family, now: float) -> dict[str, Any]:
    per_hour = dict(zip(QUANTITIES, family.flow.per_hour(now), strict=True))
    prompt, measured = per_hour["prompt"], per_hour["measured_prompt"]
    return {
        "id": family.id,
        "model": family.model,
        "tenant": family.tenants.most_common(1)[0][0] if family.tenants else None,
        "samples": family.samples,
        "requests_per_hour": round(per_hour["requests"], 1),
        "prompt_tokens_per_hour": round(prompt),
        "common_tokens": round(family.common_bytes * family.tokens_per_byte),
        "reuse": _share(per_hour["cached"], measured),
        "predicted_reuse": _share(per_hour["predicted"], prompt),
        "ceiling": _share(per_hour["cacheable"], prompt),
        "ceiling_without_leaks": _share(min(prompt, per_hour["cacheable"] + per_hour["lost"]), prompt),
        "lost_tokens_per_hour": round(sum(r.flow.per_hour(now)[1] for r in family.leaks.values() if leaks(family, r))),
    }


def leak(family: Family, row: LeakRow, now: float) -> dict[str, Any]:
    requests, lost, _ = row.flow.per_hour(now)
    error = sqrt(row.flow.sums[2]) / row.flow.sums[1] if row.flow.sums[1] else 0.0
    told: dict[str, Any] = {
        "family": family.id,
        "model": family.model,
        "kind": row.kind.value,
        "path": row.path,
        "offset": row.offset,
        "stream_offset": row.start,
        "chunk": row.chunk,
        "samples": row.samples,
        "requests_per_hour": round(requests, 1),
        "lost_tokens_per_request": round(lost / requests) if requests else 0,
        "lost_tokens_per_hour": round(lost),
        "lost_error": round(error, 3),  # standard error as a share; 0 where every request was looked at
        "advice": ADVICE[row.kind],
    }
    if row.around is not None:
        told["sample"] = row.around
    return told


def _share(part: float, whole: float) -> float | None:
    return round(min(1.0, part / whole), 4) if whole > 0 else None
