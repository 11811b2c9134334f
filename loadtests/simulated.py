"""Did the simulated replicas keep their own clock? A fleet that lags its engine time measures the machine instead.

Each simulated replica counts how late it woke for the end of a step in a histogram on its /metrics. Rule: over one
run, p99 of that lag at most 10 ms of real time, else the run is invalid. The quantile is the upper bound of its
bucket, so it errs to the strict side. Real replicas export no such histogram and are not judged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import httpx

LAG_P99_S = 0.010
BUCKET = re.compile(r'^forebay_sim_lag_seconds_bucket\{.*?le="([^"]+)".*?\} ([0-9.e+]+)', re.MULTILINE)

Counts = dict[float, float]  # upper bound in seconds -> cumulative count


async def lag_counts(urls: Sequence[str]) -> dict[str, Counts]:
    """The histogram of each replica that exports it."""
    found: dict[str, Counts] = {}
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        for url in urls:
            try:
                answer = await client.get(f"{url.rstrip('/')}/metrics")
            except httpx.HTTPError:
                continue
            counts = read(answer.text)
            if counts:
                found[url] = counts
    return found


def read(metrics: str) -> Counts:
    return {float(bound.replace("+Inf", "inf")): float(count) for bound, count in BUCKET.findall(metrics)}


def quantile(before: Counts, after: Counts, q: float) -> float | None:
    """Upper bound of the bucket in which the q-quantile of the steps in between lies; None without steps."""
    gained = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = max(gained.values(), default=0.0)
    if total <= 0.0:
        return None
    return next(bound for bound, count in gained.items() if count >= q * total)


def reasons(before: Mapping[str, Counts], after: Mapping[str, Counts]) -> list[str]:
    """Why a run on these replicas is invalid; empty when they kept their clock."""
    out = []
    for url, counts in after.items():
        p99 = quantile(before.get(url, {}), counts, 0.99)
        if p99 is not None and p99 > LAG_P99_S:
            out.append(f"simulated replica {url} woke late: lag p99 up to {p99 * 1e3:.0f} ms is over 10 ms")
    return out
