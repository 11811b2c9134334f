"""Did the generator keep its own schedule? If not, the run is INVALID and has no goodput.

A generator that falls behind makes tail latency look better where latency counts from the send, and sends a
gentler load in any case. Rule, in real seconds of this machine: every due row dispatched; lag (dispatch minus
schedule) p99 <= min(20 ms, 2 % of the smallest TTFT objective) and max <= 250 ms; a timer on the sending loop late
by no more than the same p99; CPU below 80 % of the process's core; no local error (descriptors, ports).
Trade-off: a machine shared with other work fails runs that a quiet one would pass. That is the intention.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from policies.statistics import quantile

LAG_P99_S = 0.020
LAG_SHARE_OF_TTFT = 0.02
LAG_MAX_S = 0.250
CPU_SHARE = 0.8
PROBE_S = 0.005
ADVICE = "use a quieter machine, or more --workers"
LOCAL_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})


@dataclass(slots=True)
class Sustained:
    """Figures of one sending process, real seconds."""

    lags_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    cpu_share: float = 0.0
    due: int = 0
    dispatched: int = 0
    local_errors: int = 0
    connections_opened: int = 0
    requests_on_open_connections: int = 0


@dataclass(slots=True, frozen=True)
class SustainVerdict:
    """Of all sending processes together; `reasons` is empty when the schedule was kept."""

    lag_p50_s: float | None
    lag_p99_s: float | None
    lag_max_s: float | None
    stall_p99_s: float | None
    cpu_share_max: float
    due: int
    dispatched: int
    local_errors: int
    processes: int
    lag_bound_s: float
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def lag_bound_s(smallest_ttft_s: float | None) -> float:
    """Bound of the lag's p99, real seconds; the objective too in real seconds."""
    return LAG_P99_S if smallest_ttft_s is None else min(LAG_P99_S, LAG_SHARE_OF_TTFT * smallest_ttft_s)


def verdict(parts: Sequence[Sustained], smallest_ttft_s: float | None) -> SustainVerdict:
    lags = sorted(lag for part in parts for lag in part.lags_s)
    # each process must keep its own loop alive: the worst one counts, not the pool
    stall = max((quantile(sorted(p.stalls_s), 0.99) for p in parts if p.stalls_s), default=None)
    bound = lag_bound_s(smallest_ttft_s)
    p99 = quantile(lags, 0.99) if lags else None
    cpu = max((p.cpu_share for p in parts), default=0.0)
    due, dispatched = sum(p.due for p in parts), sum(p.dispatched for p in parts)
    errors = sum(p.local_errors for p in parts)
    reasons = []
    if dispatched < due:
        reasons.append(f"{due - dispatched} of {due} due requests were never dispatched: {ADVICE}")
    if p99 is not None and p99 > bound:
        reasons.append(f"lag p99 {p99 * 1e3:.1f} ms is over {bound * 1e3:.1f} ms: {ADVICE}")
    if lags and lags[-1] > LAG_MAX_S:
        reasons.append(f"lag max {lags[-1] * 1e3:.0f} ms is over {LAG_MAX_S * 1e3:.0f} ms: {ADVICE}")
    if stall is not None and stall > bound:
        reasons.append(f"sending loop stalled: p99 {stall * 1e3:.1f} ms is over {bound * 1e3:.1f} ms: {ADVICE}")
    if cpu > CPU_SHARE:
        reasons.append(f"generator used {cpu:.0%} of its core, over {CPU_SHARE:.0%}: use more --workers")
    if errors:
        reasons.append(f"{errors} local errors (file descriptors or ports): raise ulimit -n")
    return SustainVerdict(
        quantile(lags, 0.5) if lags else None, p99, lags[-1] if lags else None, stall, cpu, due, dispatched, errors,
        len(parts), bound, tuple(reasons),
    )  # fmt: skip


class LoopProbe:
    """A timer on the sending loop: how late it fires is how late any send or receipt there may be."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self.late_s.append(max(0.0, time.perf_counter() - due))

    def cpu_share(self) -> float:
        """CPU of this process since the probe was made, in shares of one core."""
        wall = time.perf_counter() - self._wall
        return (time.process_time() - self._cpu) / wall if wall > 0 else 0.0
