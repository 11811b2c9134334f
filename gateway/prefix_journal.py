"""The report of `forebay prefixes` from a journal instead of a running gateway: the same words, added up afterwards.

A line says how much of its prompt was cached, believed cached and cacheable, and, where the gateway looked into it
before it ended, what stood where it parts from its family and what that cost. Families as such are in no journal, only
their numbers beside leaks; a gateway that was restarted numbers them anew. Lost tokens an hour are those of the time
that the journal covers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import orjson
from rich.progress import Progress

from policies.volatile import ADVICE, Leak

LEAST_SPAN_S = 60.0
_CHUNK = 256  # bytes, as `policies/prefix.py`


def read(path: Path) -> dict[str, Any]:
    """Lines that are no journal lines are counted and passed over. Raises OSError."""
    models: defaultdict[str, list[int]] = defaultdict(lambda: [0] * 6)
    tenants: defaultdict[str, list[int]] = defaultdict(lambda: [0] * 6)
    leaks: defaultdict[tuple[str, str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0, 0, 0.0])
    first = last = None
    known = strange = 0
    with Progress(transient=True) as progress, path.open("rb") as lines:
        task = progress.add_task("reading", total=path.stat().st_size)
        for line in lines:
            progress.advance(task, len(line))
            try:
                row = orjson.loads(line)
                at, model, tenant = row["received_unix"], row["model"], row["tenant"] or "-"
                counted = _counted(row)
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
                strange += 1
                continue
            known += 1
            first, last = at if first is None else min(first, at), at if last is None else max(last, at)
            if counted is not None:
                for sums in (models[model], tenants[tenant]):
                    for i, value in enumerate(counted):
                        sums[i] += value
            if (found := row.get("unmatched")) is not None and found.get("family"):
                seen = leaks[found["family"], model, found["kind"], found["path"]]
                seen[0] += found["requests"]
                seen[1] += found["lost_tokens"]
                seen[2] += 1
                seen[3] = found["offset"]
                # of as many requests as a sample stands for, all but one were not looked at
                seen[4] += found["lost_tokens"] ** 2 * (found["requests"] - 1) / max(1, found["requests"])
    span_s = max(LEAST_SPAN_S, (last or 0.0) - (first or 0.0))
    rows = [_leak(key, seen, 3600.0 / span_s) for key, seen in leaks.items()]
    return {
        "since_s": round(span_s, 1),
        "models": {name: totals(sums) for name, sums in models.items()},
        "tenants": {name: totals(sums) for name, sums in tenants.items()},
        "families": [],
        "leaks": sorted(rows, key=lambda row: -int(row["lost_tokens_per_hour"])),
        "lines": known,
        "passed_over": strange,
    }


def _counted(row: dict[str, Any]) -> tuple[int, ...] | None:
    """Requests, prompt, prompt of known cached part, cached, believed cached, cacheable; None: it did not end well."""
    if row["outcome"] != "success" or row.get("cacheable_tokens") is None:
        return None
    prompt, cached = int(row["prompt_tokens"][0] or 0), row["cached_tokens"]
    measured = cached[1] == "usage" and cached[0] is not None
    predicted = int((row["prediction"] or {}).get("cached_tokens", 0))
    return 1, prompt, prompt if measured else 0, int(cached[0]) if measured else 0, predicted, row["cacheable_tokens"]


def _leak(key: tuple[str, str, str, str], seen: list[float], per_hour: float) -> dict[str, Any]:
    family, model, kind, path = key
    requests, lost, samples, offset, variance = seen
    samples, offset = int(samples), int(offset)
    return {
        "family": family,
        "model": model,
        "kind": kind,
        "path": path,
        "offset": offset,
        "stream_offset": offset,
        "chunk": offset // _CHUNK,
        "samples": samples,
        "requests_per_hour": round(requests * per_hour, 1),
        "lost_tokens_per_request": round(lost / max(1, requests)),
        "lost_tokens_per_hour": round(lost * per_hour),
        "lost_error": round(sqrt(variance) / lost, 3) if lost else 0.0,
        "advice": ADVICE[Leak(kind)] if kind in set(Leak) else "",
    }


def totals(sums: Sequence[float]) -> dict[str, Any]:
    """Requests, prompt, prompt of known cached part, cached, believed cached and cacheable tokens, as they are told."""
    requests, prompt, measured, cached, predicted, cacheable = sums
    return {
        "requests": int(requests),
        "prompt_tokens": int(prompt),
        "cached_tokens": int(cached),
        "predicted_tokens": int(predicted),
        "cacheable_tokens": int(cacheable),
        "reuse": round(cached / measured, 4) if measured else None,
        "predicted_reuse": round(predicted / prompt, 4) if prompt else None,
        "ceiling": round(cacheable / prompt, 4) if prompt else None,
    }
