"""What `forebay simulate` prints: one table per load, arms as rows; seeds are pooled only where that is right.

Counts are summed over seeds, rates and shares averaged (equal windows), percentiles shown as the range over seeds:
a percentile of one run is a number, their mean is not one. Differences are paired by seed.
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
    console.print(_main(load, by_arm, comparisons, offered))
    console.print(_partition(by_arm))
    console.print(_buckets(by_arm))


def _main(load: float, by_arm: Mapping[str, Sequence[Run]], comparisons: Sequence[Run], offered: str) -> Table:
    table = _table(f"load {load:g}: {offered}")
    for name in (
        "arm",
        "goodput /s",
        "good/W /s",
        "attainment",
        "shed",
        "late",
        "fair",
        "TTFT p50",
        "p90",
        "p99",
        "TPOT p50",
        "p90",
        "p99",
        "n",
        "cached",
        "good prompt tok/s",
        "imbalance",
        "difference /s",
    ):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)  # fmt: skip
    for arm, runs in by_arm.items():
        against = next((c for c in comparisons if c["b"] == arm), None)
        table.add_row(
            arm,
            f"{_mean(runs, 'goodput_rps'):.3f}",
            f"{_mean(runs, 'good_per_window_rps'):.3f}",
            f"{_mean(runs, 'attainment'):.1%}",
            str(_sum(runs, "shed")),
            str(_sum(runs, "late_complete")),
            _fair(runs),
            *(_range(runs, "ttft_s", q) for q in ("p50", "p90", "p99")),
            *(_range(runs, "tpot_s", q) for q in ("p50", "p90", "p99")),
            str(sum(r["ttft_s"]["n"] for r in runs)),
            _cached(runs),
            f"{_mean(runs, 'good_prompt_tokens_per_s'):,.0f}",
            _number(_mean(runs, "imbalance")),
            DASH if against is None else difference(against),
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


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", show_edge=False, pad_edge=False)


def _mean(runs: Sequence[Run], field: str) -> float:
    values = [r[field] for r in runs if r.get(field) is not None]
    return sum(values) / len(values) if values else float("nan")


def _sum(runs: Sequence[Run], field: str) -> int:
    return sum(r[field] for r in runs)


def _number(value: float) -> str:
    return DASH if value != value else f"{value:.2f}"


def _range(runs: Sequence[Run], field: str, q: str) -> str:
    values = sorted(r[field][q] for r in runs if r[field][q] is not None)
    if not values:
        return DASH
    low, high = _seconds(values[0]), _seconds(values[-1])
    return low if low == high else f"{low}-{high}"


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
    return f"{sum(shares) / len(shares):.1%} of {sum(ceilings) / len(ceilings):.1%}"
