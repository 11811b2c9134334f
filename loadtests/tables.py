"""What `forebay simulate` prints: one table per load, arms as rows; seeds are pooled only where that is right.

Counts are summed over seeds, rates and shares averaged (equal windows), of percentiles the worst seed is shown: a
percentile of one run is a number, the mean of several is not one. Differences are paired by seed; a star excludes 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from policies.objectives import Partition

DASH = "–"
Run = Mapping[str, Any]


def print_load(console: Console, load: float, runs: Sequence[Run], comparisons: Sequence[Run], offered: str) -> None:
    """All that is known about one load."""
    arms = list(dict.fromkeys(r["policy"] for r in runs))
    by_arm = {arm: [r for r in runs if r["policy"] == arm] for arm in arms}
    console.print(_goodput(load, by_arm, comparisons, offered))
    console.print(_latency(by_arm))
    console.print(_work(by_arm))
    console.print(_partition(by_arm))
    console.print(_buckets(by_arm))
    first = runs[0]
    gap, between = first["group_gap"]["seconds"], first["group_gap"]["prompt_tokens_between"]
    if gap["n"]:
        console.print(
            f"{first['policy']}, seed {first['seed']}: a prefix group comes back after {_seconds(gap['p50'])} (p50), "
            f"{_seconds(gap['p90'])} (p90), {between['p50']:,.0f} prompt tokens (p50) later; {gap['n']} times",
            highlight=False,
        )


def _goodput(load: float, by_arm: Mapping[str, Sequence[Run]], comparisons: Sequence[Run], offered: str) -> Table:
    table = _table(f"load {load:g}: {offered}")
    _columns(table, "arm", "goodput /s", "attained", "shed", "late", "fair", "difference /s")
    for arm, runs in by_arm.items():
        against = next((c for c in comparisons if c["b"] == arm), None)
        table.add_row(
            arm,
            f"{_mean(runs, 'goodput_rps'):.3f}",
            f"{_mean(runs, 'attainment'):.1%}",
            str(_sum(runs, "shed")),
            str(_sum(runs, "late_complete")),
            _fair(runs),
            DASH if against is None else difference(against),
        )
    return table


def _latency(by_arm: Mapping[str, Sequence[Run]]) -> Table:
    table = _table("TTFT | TPOT of complete answers, the worst seed of each (n over all seeds)")
    _columns(table, "arm", "p50", "p90", "p99", "| p50", "p90", "p99", "n")
    for arm, runs in by_arm.items():
        quantiles = ("p50", "p90", "p99")
        cells = [_worst(runs, name, q) for name in ("ttft_s", "tpot_s") for q in quantiles]
        table.add_row(arm, *cells, str(sum(r["ttft_s"]["n"] for r in runs)))
    return table


def _work(by_arm: Mapping[str, Sequence[Run]]) -> Table:
    table = _table("cached share of prompt tokens and its ceiling, work, balance (1 is even)")
    _columns(table, "arm", "cached / ceiling", "good/W", "good prompt", "output tok/s", "balance", "preempted")
    for arm, runs in by_arm.items():
        table.add_row(
            arm,
            _cached(runs),
            f"{_mean(runs, 'good_per_window_rps'):.3f}",
            f"{_mean(runs, 'good_prompt_tokens_per_s'):,.0f}",
            f"{_mean(runs, 'output_tokens_per_s'):,.0f}",
            _number(_mean(runs, "imbalance")),
            str(_sum(runs, "preemptions")),
        )
    return table


def _partition(by_arm: Mapping[str, Sequence[Run]]) -> Table:
    held = [p.value for p in Partition if any(r["outcomes"][p.value] for runs in by_arm.values() for r in runs)]
    table = _table("partition of the cohort, all seeds")
    table.add_column("arm")
    for name in ("offered", *held):
        table.add_column(name, justify="right")
    for arm, runs in by_arm.items():
        counts = (sum(r["outcomes"][name] for r in runs) for name in held)
        table.add_row(arm, str(_sum(runs, "offered")), *(str(c) for c in counts))
    return table


def _buckets(by_arm: Mapping[str, Sequence[Run]]) -> Table:
    names = list(dict.fromkeys(b for runs in by_arm.values() for r in runs for b in r["by_bucket"]))
    table = _table("attainment by prompt tokens (requests offered, all seeds)")
    table.add_column("arm")
    for name in names:
        first = next(iter(by_arm.values()))
        offered = sum(r["by_bucket"].get(name, {}).get("offered", 0) for r in first)
        table.add_column(f"{name} ({offered})", justify="right")
    for arm, runs in by_arm.items():
        cells = []
        for name in names:
            parts = [r["by_bucket"][name] for r in runs if name in r["by_bucket"]]
            offered = sum(p["offered"] for p in parts)
            cells.append(f"{sum(p['good'] for p in parts) / offered:.1%}" if offered else DASH)
        table.add_row(arm, *cells)
    return table


def difference(comparison: Run) -> str:
    """+0.41 [0.32, 0.52], a star when the interval excludes zero; a dash with one seed."""
    found = comparison.get("goodput_rps")
    if found is None:
        return DASH
    if found["n"] < 2:
        return f"{found['estimate']:+.3f} (one seed)"
    star = "*" if found["low"] > 0 or found["high"] < 0 else ""
    return f"{found['estimate']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]{star}"


def _columns(table: Table, first: str, *others: str) -> None:
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=name.startswith("difference"))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", show_edge=False, pad_edge=False)


def _mean(runs: Sequence[Run], field: str) -> float:
    values = [r[field] for r in runs if r.get(field) is not None]
    return sum(values) / len(values) if values else float("nan")


def _sum(runs: Sequence[Run], field: str) -> int:
    return sum(r[field] for r in runs)


def _number(value: float) -> str:
    return DASH if value != value else f"{value:.2f}"


def _worst(runs: Sequence[Run], field: str, q: str) -> str:
    values = [r[field][q] for r in runs if r[field][q] is not None]
    return _seconds(max(values)) if values else DASH


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f}ms" if value < 1.0 else f"{value:.1f}s"


def _fair(runs: Sequence[Run]) -> str:
    holds = sum(r["fairness"]["holds"] for r in runs)
    return "yes" if holds == len(runs) else f"{holds}/{len(runs)}"


def _cached(runs: Sequence[Run]) -> str:
    shares = [r["reuse"]["achieved"] for r in runs if r["reuse"]["achieved"] is not None]
    ceilings = [r["reuse"]["ceiling"] for r in runs if r["reuse"]["ceiling"] is not None]
    if not shares or not ceilings:
        return DASH
    return f"{sum(shares) / len(shares):.1%} / {sum(ceilings) / len(ceilings):.1%}"
