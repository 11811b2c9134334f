"""What the replicas' own histograms gained during a run: queue, prefill and decode time, preemptions, cache hits.

vLLM observes these at the end of a request and without names, so they are means over a fleet, not of single requests.
Unknown stays unknown: a replica that exports no such metric contributes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import httpx

SERIES = {
    "vllm:request_queue_time_seconds_sum": "queue_sum_s",
    "vllm:request_queue_time_seconds_count": "queue_count",
    "vllm:request_prefill_time_seconds_sum": "prefill_sum_s",
    "vllm:request_prefill_time_seconds_count": "prefill_count",
    "vllm:request_decode_time_seconds_sum": "decode_sum_s",
    "vllm:request_decode_time_seconds_count": "decode_count",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:external_prefix_cache_queries_total": "external_queries",
    "vllm:external_prefix_cache_hits_total": "external_hits",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:iteration_tokens_total_count": "steps",
}
GAUGES = {
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}
LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)

Totals = dict[str, float]


def read(metrics: str) -> Totals:
    """Totals by our names, summed over engines; gauges take the largest (KV usage of the fullest engine)."""
    found: Totals = {}
    for name, value in LINE.findall(metrics):
        if name in SERIES:
            found[SERIES[name]] = found.get(SERIES[name], 0.0) + float(value)
        elif name in GAUGES:
            found[GAUGES[name]] = max(found.get(GAUGES[name], 0.0), float(value))
    return found


async def totals(urls: Sequence[str]) -> dict[str, Totals]:
    found: dict[str, Totals] = {}
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        for url in urls:
            try:
                answer = await client.get(f"{url.rstrip('/').removesuffix('/v1')}/metrics")
            except httpx.HTTPError:
                continue
            if answer.status_code == 200:
                found[url] = read(answer.text)
    return found


def gained(before: Mapping[str, Totals], after: Mapping[str, Totals]) -> Totals:
    """Sums over the replicas seen both times; gauges as they are at the end. A counter that fell was a restart."""
    out: Totals = {}
    for url, late in after.items():
        early = before.get(url)
        if early is None:
            continue
        for name, value in late.items():
            if name in GAUGES.values():
                out[name] = max(out.get(name, 0.0), value)
            else:
                change = value - early.get(name, 0.0)
                out[name] = out.get(name, 0.0) + (value if change < 0 else change)
    return out


def mean_s(totals: Totals, part: str) -> float | None:
    """Mean seconds of `queue`, `prefill` or `decode` per finished request; None where nothing finished."""
    count = totals.get(f"{part}_count", 0.0)
    return totals[f"{part}_sum_s"] / count if count > 0 else None


def by_cache(totals: Totals) -> dict[str, float]:
    """`own_cache` and `external_cache`: shares of the prompt tokens that were asked for, 0..1; empty: nobody tells.

    vLLM asks its own cache for every prompt token and an external one (a KV connector, as LMCache) for what its own
    lacks; a request's `cached_tokens` is the sum of both.
    """
    asked = totals.get("prefix_queries", 0.0)
    if not asked:
        return {}
    hits = {"own_cache": "prefix_hits", "external_cache": "external_hits"}
    return {name: totals.get(counter, 0.0) / asked for name, counter in hits.items()}
