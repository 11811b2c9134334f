"""What goes on at replicas, gateway and this host second by second, and what of it moves with the wait in queues.

Every second: the mean wait of the requests that left a queue in it (the gateway's own plus the engines'), beside KV
usage, preemptions, the share of time that pacing leaves for prefills, the lag of the gateway's loop, and how busy the
cores of this host were. Over a run, Spearman's rank correlation of the wait with each, since what matters is whether
they rise together and not by which curve. It shows company and not cause, and host load is that of the machine where
the command runs. Trade-off: a request every second to each replica, from a thread beside the progress bar.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from loadtests import engine_watch
from loadtests.engine_watch import Totals, gained, mean_s

EVERY_S = 1.0
LEAST = 10  # seconds with a known wait, below which nothing is said
BESIDE = {
    "kv_usage": "KV usage", "preemptions": "preemptions", "pacing_rate": "pacing rate", "loop_lag_s": "gateway lag",
    "host_busy": "load of this host",
}  # fmt: skip
GATEWAY = {
    "forebay_queue_wait_seconds_sum": "held_sum_s",
    "forebay_queue_wait_seconds_count": "held_count",
    "forebay_event_loop_lag_seconds": "loop_lag_s",
    "forebay_replica_pacing_rate": "pacing_rate",  # summed over replicas
}
Row = dict[str, float]


class Watch:
    """`with Watch(...) as watch:` and then `watch.rows`, one for each second; a thread of its own until the end."""

    def __init__(self, replicas: Sequence[str], gateway: str | None = None, every_s: float = EVERY_S) -> None:
        self.rows: list[Row] = []
        self.totals: Totals = {}  # what the gateway's sums gained since the beginning
        self._replicas, self._gateway, self._every_s = tuple(replicas), gateway, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="forebay-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        begun = time.monotonic()
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            before, busy = self._read(client), _cpu_times()
            first = before.get("gateway", {})
            while not self._over.wait(self._every_s):
                now, busy_now = self._read(client), _cpu_times()
                self.rows.append({"at_s": round(time.monotonic() - begun, 2), **second(before, now, busy, busy_now)})
                before, busy = now, busy_now
            self.totals = gained({"gateway": first}, {"gateway": self._read(client).get("gateway", {})})

    def _read(self, client: httpx.Client) -> dict[str, Totals]:
        found: dict[str, Totals] = {}
        for url in self._replicas:
            if text := _metrics(client, url):
                found[url] = engine_watch.read(text)
        if self._gateway is not None and (text := _metrics(client, self._gateway)):
            found["gateway"] = of_gateway(text)
        return found


def _metrics(client: httpx.Client, url: str) -> str | None:
    try:
        answer = client.get(f"{url.rstrip('/').removesuffix('/v1')}/metrics")
    except httpx.HTTPError:
        return None
    return answer.text if answer.status_code == 200 else None


def of_gateway(metrics: str) -> Totals:
    """Sums over all labels of what is looked at in a gateway's own metrics."""
    found: Totals = {}
    for name, value in engine_watch.LINE.findall(metrics):
        if name in GATEWAY:
            found[GATEWAY[name]] = found.get(GATEWAY[name], 0.0) + float(value)
    return found


def second(
    before: Mapping[str, Totals],
    now: Mapping[str, Totals],
    cpu_before: tuple[float, float] = (0.0, 0.0),
    cpu_now: tuple[float, float] = (0.0, 0.0),
) -> Row:
    """What is known of the time between two looks; `wait_s` only where a request left a queue in it."""
    gateway, earlier = now.get("gateway", {}), before.get("gateway", {})
    engines = gained(
        {url: totals for url, totals in before.items() if url != "gateway"},
        {url: totals for url, totals in now.items() if url != "gateway"},
    )
    row: Row = {name: engines[name] for name in ("kv_usage", "waiting", "preemptions") if name in engines}
    row |= {name: gateway[name] for name in ("loop_lag_s", "pacing_rate") if name in gateway}
    held = gateway.get("held_count", 0.0) - earlier.get("held_count", 0.0)
    waits = [mean_s(engines, "queue")]
    if earlier and held > 0:
        waits.append((gateway["held_sum_s"] - earlier["held_sum_s"]) / held)
    if known := [wait for wait in waits if wait is not None]:
        row["wait_s"] = sum(known)
    busy, whole = cpu_now[0] - cpu_before[0], cpu_now[1] - cpu_before[1]
    if whole > 0:
        row["host_busy"] = busy / whole
    return row


def _cpu_times() -> tuple[float, float]:
    """(busy, all) of this host's cores in ticks; the time stolen by others of the same machine counts as busy."""
    try:
        fields = [float(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0, 0.0
    return sum(fields) - fields[3] - fields[4], sum(fields)  # idle and waiting for disks


def company(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, int]]:
    """(what, correlation with the wait in -1..1, seconds) of what is known often enough and changes; largest first."""
    found = []
    for name in BESIDE:
        pairs = [(row["wait_s"], row[name]) for row in rows if "wait_s" in row and name in row]
        if len(pairs) >= LEAST and (rho := correlation(*zip(*pairs, strict=True))) is not None:
            found.append((name, rho, len(pairs)))
    return sorted(found, key=lambda one: -abs(one[1]))


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Spearman's: Pearson's of the ranks, ties sharing the mean of theirs. None where one of them does not change."""
    a, b = _ranks(xs), _ranks(ys)
    mean = (len(a) + 1) / 2
    across = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    own = sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)
    return across / own**0.5 if own > 0 else None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end < len(order) and values[order[end]] == values[order[at]]:
            end += 1
        for place in order[at:end]:
            ranks[place] = (at + 1 + end) / 2
        at = end
    return ranks


def line(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """For people; None where too little is known."""
    found = company(rows)
    if not found:
        return None
    told = ", ".join(f"{BESIDE[name]} {rho:+.2f}" for name, rho, _ in found)
    return f"the wait in queues moves with: {told} (rank correlation over {max(n for _, _, n in found)} s)"
