"""Where a request's time went: client lag, gateway queue, engine queue, prefill, decode, transport.

From the client: lag = dispatch - schedule; gateway queue as the gateway says; decode = last - first content; the rest
of the time to the first token belongs to the replica and the way to it. It is divided by the request's own vLLM figures
where the replica gives them (`--enable-per-request-metrics`), else in the proportion of the fleet's mean queue and
prefill times, and what these do not explain is transport, as is the time from the last content to the end.
The parts of a request sum to its E2E. Trade-off: without per-request figures the division is right only on average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from loadtests.engine_watch import Totals, mean_s


@dataclass(slots=True)
class Split:
    """Seconds."""

    client_lag: float = 0.0
    gateway_queue: float = 0.0
    engine_queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    transport: float = 0.0
    undivided: float = 0.0  # at the replica or on the way to it, where nothing tells queue, prefill and way apart

    @property
    def total(self) -> float:
        return sum(float(getattr(self, f.name)) for f in fields(self))

    def shares(self) -> dict[str, float]:
        whole = self.total
        return {f.name: getattr(self, f.name) / whole if whole > 0 else 0.0 for f in fields(self)}


def split(row: Mapping[str, Any], engine: Totals) -> Split | None:
    """Of one complete, streamed answer (a line of requests.jsonl); None where its times are not known."""
    times = [row.get(name) for name in ("scheduled_s", "dispatched_s", "first_s", "last_s", "end_s")]
    if any(t is None for t in times):
        return None
    scheduled, dispatched, first, last, end = (float(t) for t in times if t is not None)
    out = Split(client_lag=max(0.0, dispatched - scheduled), decode=last - first)
    out.gateway_queue = min(max(0.0, row.get("queue_s") or 0.0), first - dispatched)
    left = first - dispatched - out.gateway_queue
    inside = _replica(row, engine)
    if inside is None:
        out.undivided, out.transport = max(0.0, left), max(0.0, end - last)
        return out
    queue_s, prefill_s = inside
    known = queue_s + prefill_s
    if known > left > 0.0:  # means of a fleet may exceed what this request spent
        queue_s, prefill_s = queue_s * left / known, prefill_s * left / known
    elif left <= 0.0:
        queue_s = prefill_s = 0.0
    out.engine_queue, out.prefill = queue_s, prefill_s
    out.transport = max(0.0, left - queue_s - prefill_s) + max(0.0, end - last)
    return out


def _replica(row: Mapping[str, Any], engine: Totals) -> tuple[float, float] | None:
    """(queue, prefill) seconds inside the replica; None where neither it nor the fleet's metrics say."""
    own = row.get("engine") or {}
    if own.get("time_to_first_token_ms") is not None:
        queue_s = float(own.get("queue_time_ms") or 0.0) / 1e3
        return queue_s, max(0.0, float(own["time_to_first_token_ms"]) / 1e3 - queue_s)
    queue, prefill = mean_s(engine, "queue"), mean_s(engine, "prefill")
    return None if queue is None and prefill is None else (queue or 0.0, prefill or 0.0)


def mean(splits: Sequence[Split]) -> Split:
    out = Split()
    for f in fields(Split):
        setattr(out, f.name, sum(getattr(s, f.name) for s in splits) / len(splits) if splits else 0.0)
    return out
