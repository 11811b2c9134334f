"""The whole gateway at one moment, as plain values: what the live page draws, once a second while somebody looks.

Rates, attainment and percentiles are of the requests that ended in the last minute (rates of all classes together: ten
seconds), the rest is now. Attainment is good over offered, so what was refused counts against it. Percentiles are of
single requests (nearest rank), shown beside the bound that the median request had, since a TTFT objective grows with
its prompt. Costs about a millisecond.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gateway.recent import Ended, told
from gateway.record import TokenSource
from policies.objectives import Partition

if TYPE_CHECKING:
    from gateway.app import Gateway

MOST_FAMILIES = 12
TILE_S = 10.0  # the rates of all together, so that a change is seen soon
MOST_NOTABLE = 24


def snapshot(gateway: Gateway, now: float) -> dict[str, Any]:
    """`now`: monotonic seconds."""
    core = gateway.balancer.snapshot()
    rows, window_s = gateway.recent.window(now)
    held = gateway.proxy.held()
    return {
        "unix": round(time.time(), 3),
        "version": gateway.version,
        "uptime_s": round(now - gateway.begun_at, 1),
        "config_version": gateway.control.versions[-1].number,
        "policy": gateway.control.config.policy.name,
        "target": gateway.control.config.admission.target_attainment,
        "draining": gateway.proxy.draining,
        "overloaded": gateway.proxy.door.shedding,
        "loop_lag_s": round(gateway.lag.mean_s, 4),
        "window_s": round(min(window_s, max(1.0, now - gateway.begun_at)), 1),
        "open": gateway.open_requests,
        "held": len(held),
        "held_bytes": core["held_bytes"],
        "oldest_wait_s": round(max((now - e.record.received_at for e in held), default=0.0), 3),
        "working_set_tokens": core["working_set_tokens"],
        "working_set_enforced": core["working_set_enforced"],
        "prediction_error": core["prediction_error"],
        "total": _of_class(rows, window_s) | _rates([row for row in rows if now - row.ended_at <= TILE_S], TILE_S),
        "classes": _classes(gateway, core, rows, window_s),
        "replicas": _replicas(gateway, core, rows, now),
        "experiment": gateway.experiments.results(),
        "shadows": [
            {
                "policy": name,
                "asked": tally.asked,
                "agreed": round(tally.agreed / tally.asked, 4) if tally.asked else None,
                "uncached_tokens": round((tally.more_tokens - tally.fewer_tokens) / max(1, tally.asked), 1),
                "ttft_s": round((tally.later_s - tally.sooner_s) / max(1, tally.asked), 5),
            }
            for name, tally in gateway.shadows.tallies.items()
        ],
        "prefixes": _prefixes(gateway),
        "notable": [
            told(record, now) for record, _ in zip(gateway.recent.notable(), range(MOST_NOTABLE), strict=False)
        ],
    }


def _classes(gateway: Gateway, core: dict[str, Any], rows: Sequence[Ended], window_s: float) -> list[dict[str, Any]]:
    by_class: defaultdict[str, list[Ended]] = defaultdict(list)
    for row in rows:
        by_class[row.service_class].append(row)
    return [
        {"name": name, "held": core["held"].get(name, 0), **_of_class(by_class[name], window_s)}
        for name in gateway.control.config.classes
    ]


def _of_class(rows: Sequence[Ended], window_s: float) -> dict[str, Any]:
    ttft = sorted(t for row in rows if (t := row.ttft_s) is not None)
    tpot = sorted(t for row in rows if (t := row.tpot_s) is not None)
    prompt, cached = _reuse(rows)
    good = sum(row.partition is Partition.GOOD for row in rows)
    return _rates(rows, window_s) | {
        "attainment": round(good / len(rows), 4) if rows else None,
        "reuse": round(cached / prompt, 4) if prompt else None,
        "ttft_p50_s": _rank(ttft, 0.5),
        "ttft_p95_s": _rank(ttft, 0.95),
        "ttft_objective_s": _rank(sorted(o for row in rows if (o := row.objectives.ttft_s) is not None), 0.5),
        "ttft_met": _met((row.ttft_s, row.objectives.ttft_s) for row in rows),
        "tpot_p50_s": _rank(tpot, 0.5),
        "tpot_p95_s": _rank(tpot, 0.95),
        "tpot_objective_s": _rank(sorted(o for row in rows if (o := row.objectives.tpot_s) is not None), 0.5),
        "tpot_met": _met((row.tpot_s, row.objectives.tpot_s) for row in rows),
    }


def _rates(rows: Sequence[Ended], window_s: float) -> dict[str, Any]:
    count: Counter[Partition | None] = Counter(row.partition for row in rows)
    good, shed = count[Partition.GOOD], count[Partition.REJECTED]
    return {
        "offered_rps": round(len(rows) / window_s, 3),
        "good_rps": round(good / window_s, 3),
        "shed_rps": round(shed / window_s, 3),
        "late_rps": round((len(rows) - good - shed - count[Partition.ABANDONED]) / window_s, 3),
        "output_tps": round(sum(row.completion.count or 0 for row in rows) / window_s, 1),
    }


def _replicas(gateway: Gateway, core: dict[str, Any], rows: Sequence[Ended], now: float) -> list[dict[str, Any]]:
    by_replica: defaultdict[str, list[Ended]] = defaultdict(list)
    for row in rows:
        if row.replica_id is not None:
            by_replica[row.replica_id].append(row)
    told = []
    for replica in gateway.fleet.replicas.values():
        health = gateway.fleet.health.records[replica.id]
        state = gateway.balancer.fleet.replicas.get(replica.id)
        known = core["replicas"].get(replica.id, {})
        scraped = None if state is None else state.scraped
        prompt, cached = _reuse(by_replica[replica.id])
        told.append(
            {
                "id": replica.id,
                "url": replica.url,
                "models": sorted(replica.base_models),
                "available": gateway.fleet.available(replica.id),
                "draining": replica.draining,
                "phase": health.phase.value,
                "reason": health.reason,
                "back_in_s": max(0.0, round(health.until - now, 1)) if health.reason else 0.0,
                "in_flight": known.get("in_flight", 0),
                "running": None if scraped is None else scraped.running,
                "waiting": None if scraped is None else scraped.waiting,
                "backlog_tokens": round(known.get("backlog_tokens", 0.0)),
                "backlog_s": round(known.get("backlog_s", 0.0), 3),
                "kv_capacity_tokens": _whole(known.get("kv_capacity_tokens")),
                "kv_free_tokens": _whole(known.get("kv_free_tokens")),
                "reuse": round(cached / prompt, 4) if prompt else None,
                "prefix_precision": known.get("prefix_precision"),
                "pace_rate": known.get("pace_rate"),
                "pace_closed_share": known.get("pace_closed_share"),
                "prefill_rate": _whole(known.get("prefill_rate")),
                "scrape_age_s": None if scraped is None else round(now - scraped.at, 1),
            }
        )
    return told


def _prefixes(gateway: Gateway) -> dict[str, Any] | None:
    """None: switched off."""
    if gateway.prefixes is None:
        return None
    report = gateway.prefixes.report()
    return {
        "families": report["families"][:MOST_FAMILIES],
        "known": len(report["families"]),
        "leaks": report["leaks"][:MOST_FAMILIES],
        "models": report["models"],
    }


def _reuse(rows: Iterable[Ended]) -> tuple[int, int]:
    """Prompt and cached tokens of the requests whose replica said both."""
    prompt = cached = 0
    for row in rows:
        if row.cached.source is TokenSource.USAGE and row.cached.count is not None and row.prompt.count:
            prompt += row.prompt.count
            cached += row.cached.count
    return prompt, cached


def _met(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Share within their own bound."""
    known = [(seen, bound) for seen, bound in pairs if seen is not None and bound is not None]
    return round(sum(seen <= bound for seen, bound in known) / len(known), 4) if known else None


def _rank(ordered: Sequence[float], share: float) -> float | None:
    """Nearest rank."""
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 5)


def _whole(value: float | None) -> int | None:
    return None if value is None or value != value or value in (float("inf"), float("-inf")) else round(value)
