"""The figures of a report, from the entries of summary.json and the records.

Colours are those of Okabe and Ito (2008), told apart by people with any colour vision; markers and line styles differ
as well, so that a figure survives a grey printer. Figures start at zero where lengths are compared, use a logarithm
where times span decades, and name their populations. Goodput: mean over seeds with the bootstrap interval.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from loadtests.pairing import AGAIN
from loadtests.results import BUCKETS, LAST_BUCKET
from policies.objectives import Partition
from policies.statistics import bootstrap_mean, percentiles

matplotlib.use("Agg")

Run = Mapping[str, Any]
INK, MUTED, GRID = "#1b1f24", "#59636e", "#d8dee4"
BLUE, VERMILION, GREEN, ORANGE, PINK, SKY, BROWN = (
    "#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#7f5539",
)  # fmt: skip
OTHERS = (VERMILION, GREEN, PINK, ORANGE, SKY, BROWN)
MARKERS = "osD^vP*X"
BUCKET_NAMES = {
    "to_1k": "up to 1k", "1k_4k": "1k to 4k", "4k_16k": "4k to 16k", "16k_64k": "16k to 64k", LAST_BUCKET: "over 64k",
}  # fmt: skip
OUTCOME_COLOURS = {
    Partition.GOOD: GREEN, Partition.SLOW_TTFT: ORANGE, Partition.SLOW_TPOT: "#f0b95b", Partition.SLOW_ITL: "#f6d9a4",
    Partition.SLOW_E2E: "#c98a1a", Partition.REJECTED: SKY, Partition.ABANDONED: "#b8c0c8",
    Partition.ERROR_HTTP: VERMILION, Partition.ERROR_TRANSPORT: "#a34700", Partition.TRUNCATED: PINK,
    Partition.UNFINISHED: "#8c959f", Partition.NOT_DISPATCHED: "#59636e",
}  # fmt: skip
STYLE: Any = {
    "font.size": 10.5, "font.family": "DejaVu Sans", "axes.edgecolor": MUTED, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "axes.axisbelow": True, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "legend.frameon": False, "figure.facecolor": "white", "savefig.facecolor": "white",
}  # fmt: skip


def arms_of(runs: Sequence[Run]) -> list[str]:
    """Arms in order of first appearance; the second run of an A/A pair is no arm of its own."""
    return [name for name in dict.fromkeys(str(r["policy"]) for r in runs) if not name.endswith(AGAIN)]


def look_of(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of each arm: ours blue and thick, the oracle black and dotted."""
    looks: dict[str, dict[str, Any]] = {}
    others = 0
    for i, arm in enumerate(arms):
        if arm == "forebay":
            looks[arm] = {"color": BLUE, "marker": "o", "linewidth": 2.6, "zorder": 5}
        elif arm.startswith("oracle"):
            looks[arm] = {"color": INK, "marker": "", "linestyle": ":", "linewidth": 2.0}
        else:
            colour = OTHERS[others % len(OTHERS)]
            looks[arm] = {"color": colour, "marker": MARKERS[(i + 1) % len(MARKERS)], "linewidth": 1.6}
            others += 1
    return looks


def png(figure: Figure) -> bytes:
    """At twice the screen's resolution."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=170, bbox_inches="tight", metadata={"Software": None})
    return out.getvalue()


def _figure(width: float, height: float, columns: int = 1, rows: int = 1, **more: Any) -> tuple[Figure, Any]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **more)
    return figure, axes


def goodput_against_load(runs: Sequence[Run], value: str = "goodput_rps") -> Figure | None:
    """Mean over seeds with its interval for each arm and load; None without valid runs at two loads."""
    loads = sorted({float(r["load"]) for r in runs})
    if len(loads) < 2:
        return None
    figure, axes = _figure(8.6, 4.4)
    with matplotlib.rc_context(STYLE):
        axis = axes[0][0]
        for arm, look in look_of(arms_of(runs)).items():
            points = [(load, values) for load in loads if (values := _values(runs, arm, load, value))]
            means = [bootstrap_mean(values) for _, values in points]
            xs = [load for load, _ in points]
            axis.plot(xs, [m.estimate for m in means], label=arm, markersize=6, **look)
            if any(m.n > 1 for m in means):
                low = [m.low if m.n > 1 else m.estimate for m in means]
                high = [m.high if m.n > 1 else m.estimate for m in means]
                axis.fill_between(xs, low, high, color=look["color"], alpha=0.13, linewidth=0)
        if value == "goodput_rps":
            span = [(float(r["load"]), r["offered"] / (r["window_s"] + r["drain_s"])) for r in runs]
            offered = [max(v for at, v in span if at == load) for load in loads]
            axis.plot(loads, offered, color=MUTED, linestyle="--", linewidth=1.1, label="all offered")
            axis.set_ylabel("good requests / s of W + D")
        else:
            axis.set_ylabel("attainment")
            axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
        axis.set_xlabel("load, multiples of the source's own rate")
        axis.set_ylim(bottom=0)
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def goodput_bars(runs: Sequence[Run]) -> Figure:
    """Goodput of each arm at one load, one dot a seed: for results without a curve."""
    arms = arms_of(runs)
    figure, axes = _figure(8.6, 0.6 + 0.55 * len(arms))
    with matplotlib.rc_context(STYLE):
        axis = axes[0][0]
        for i, (arm, look) in enumerate(look_of(arms).items()):
            values = [v for r in runs if r["policy"] == arm and (v := r["goodput_rps"]) is not None]
            if not values:
                axis.text(0.0, i, "  no valid run", va="center", color=MUTED)
                continue
            axis.barh(i, sum(values) / len(values), color=look["color"], height=0.6, alpha=0.85)
            axis.plot(values, [i] * len(values), "o", color=INK, markersize=3.5, alpha=0.8)
        axis.set_yticks(range(len(arms)), arms)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set_xlabel("good requests / s of W + D; a dot for each seed")
    return figure


def latency_by_bucket(records: Mapping[str, Sequence[Mapping[str, Any]]], name: str, title: str) -> Figure | None:
    """p50, p90 and p99 of complete answers by prompt length and arm; logarithmic."""
    buckets = [b for b, _ in BUCKETS] + [LAST_BUCKET]
    found = {
        (b, arm): percentiles(r[name] for r in rows if r["bucket"] == b and r[name] is not None)
        for arm, rows in records.items()
        for b in buckets
    }
    shown = [b for b in buckets if any(found[b, arm].n for arm in records)]
    if not shown:
        return None
    figure, axes = _figure(8.6, 0.9 + len(shown) * (0.2 * len(records) + 0.22))
    with matplotlib.rc_context(STYLE):
        axis = axes[0][0]
        ticks, names, at = [], [], 0.0
        looks = look_of(list(records))
        for b in shown:
            ticks.append(at + (len(records) - 1) / 2)
            names.append(BUCKET_NAMES[b])
            for arm in records:
                p = found[b, arm]
                if p.n and p.p50 is not None:
                    colour = looks[arm]["color"]
                    axis.plot([p.p50, p.p99], [at, at], color=colour, linewidth=4, alpha=0.35, solid_capstyle="round")
                    axis.plot(p.p50, at, "o", color=colour, markersize=6, label=arm if b == shown[0] else None)
                    axis.plot(p.p90, at, "|", color=colour, markersize=11, markeredgewidth=2.2)
                    axis.plot(p.p99, at, ">", color=colour, markersize=5)
                    axis.annotate(f"n={p.n}", (p.p99, at), xytext=(7, 0), textcoords="offset points",
                                  va="center", fontsize=7.5, color=MUTED)  # fmt: skip
                at += 1
            at += 0.9
        axis.set_yticks(ticks, names)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(FuncFormatter(_time))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(f"{title}: p50 (dot), p90 (bar), p99 (arrow)")
        axis.set_ylabel("prompt tokens")
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def timelines(runs: Sequence[Run]) -> Figure:
    """Offered, good, shed and open requests over time, one panel an arm, the same axes."""
    first = {arm: next(r for r in runs if r["policy"] == arm) for arm in arms_of(runs)}
    figure, axes = _figure(8.6, 1.75 * len(first) + 0.4, rows=len(first), sharex=True, sharey=True)
    with matplotlib.rc_context(STYLE):
        for axis, (arm, run) in zip((row[0] for row in axes), first.items(), strict=True):
            line = run["timeline"]
            width = line["bin_s"]
            at = [i * width for i in range(len(line["offered"]))]
            per_s = {name: [v / width for v in line[name]] for name in ("offered", "good", "shed")}
            axis.fill_between(at, per_s["good"], step="post", color=GREEN, alpha=0.55, linewidth=0, label="good")
            tops = [g + s for g, s in zip(per_s["good"], per_s["shed"], strict=True)]
            axis.fill_between(at, per_s["good"], tops, step="post", color=SKY, alpha=0.7, linewidth=0, label="shed")
            axis.step(at, per_s["offered"], where="post", color=INK, linewidth=1.2, label="offered")
            axis.set_title(arm)
            axis.set_ylabel("requests / s")
            beside = axis.twinx()
            beside.spines["right"].set_visible(True)
            beside.grid(visible=False)
            beside.step(at, line["open"], where="post", color=VERMILION, linewidth=1.2, linestyle="--", label="open")
            beside.set_ylabel("open requests", color=VERMILION)
            beside.set_ylim(0, 1.15 * max(1, *(max(r["timeline"]["open"]) for r in first.values())))
            if axis is axes[0][0]:
                lines, names = axis.get_legend_handles_labels()
                more, more_names = beside.get_legend_handles_labels()
                axis.legend(lines + more, names + more_names, ncol=4, loc="lower right", bbox_to_anchor=(1.0, 1.0))
        axes[-1][0].set_xlabel("seconds from the start of the window, by scheduled time")
        axes[0][0].set_ylim(bottom=0)
    return figure


def reuse(runs: Sequence[Run]) -> Figure | None:
    """Share of prompt tokens from cache for each arm, against the ceiling of the workload."""
    arms = arms_of(runs)
    shares = {arm: _values(runs, arm, None, "achieved", "reuse") for arm in arms}
    if not any(shares.values()):
        return None
    figure, axes = _figure(8.6, 0.9 + 0.5 * len(arms))
    with matplotlib.rc_context(STYLE):
        axis = axes[0][0]
        for i, (arm, look) in enumerate(look_of(arms).items()):
            values = shares[arm]
            if values:
                mean = sum(values) / len(values)
                axis.barh(i, mean, color=look["color"], height=0.55, alpha=0.85)
                axis.annotate(f"{mean:.0%}", (mean, i), xytext=(5, 0), textcoords="offset points", va="center")
        lines = (("ceiling", "one endless cache", "-"), ("round_robin_ceiling", "dealt in turn", ":"))
        for key, name, style in lines:
            values = _values(runs, arms[0], None, key, "reuse")
            if values:
                axis.axvline(sum(values) / len(values), color=INK, linestyle=style, linewidth=1.4, label=name)
        axis.set_yticks(range(len(arms)), arms)
        axis.invert_yaxis()
        axis.set_xlim(0, 1)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
        axis.set_xlabel("prompt tokens found in the cache")
        axis.grid(axis="y", visible=False)
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), title="ceiling")
    return figure


def balance(runs: Sequence[Run]) -> Figure | None:
    """Prompt tokens computed on each replica, as a share of an even split."""
    first = {arm: next(r for r in runs if r["policy"] == arm) for arm in arms_of(runs)}
    held = {arm: r["per_replica"] for arm, r in first.items() if r["per_replica"]}
    if not held:
        return None
    figure, axes = _figure(8.6, 1.0 + 0.5 * len(held))
    with matplotlib.rc_context(STYLE):
        axis = axes[0][0]
        looks = look_of(list(first))
        for i, (arm, replicas) in enumerate(held.items()):
            work = sorted(v["prompt_tokens"] - v["cached"] for v in replicas.values())
            even = sum(work) / len(work) if sum(work) else 1.0
            axis.plot(
                [w / even for w in work], [i] * len(work), "o", color=looks[arm]["color"], markersize=8, alpha=0.6
            )
        axis.axvline(1.0, color=INK, linewidth=1.2)
        axis.set_yticks(range(len(held)), list(held))
        axis.set_ylim(len(held) - 0.5, -0.5)
        axis.set_xlim(left=0)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel("prompt tokens computed on a replica / an even share; a dot for each replica")
    return figure


def outcomes(runs: Sequence[Run]) -> Figure:
    """What became of every offered request, as shares; one bar an arm."""
    arms = arms_of(runs)
    figure, axes = _figure(8.6, 1.1 + 0.5 * len(arms))
    with matplotlib.rc_context(STYLE):
        axis = axes[0][0]
        left = [0.0] * len(arms)
        for partition, colour in OUTCOME_COLOURS.items():
            shares = []
            for arm in arms:
                mine = [r for r in runs if r["policy"] == arm]
                offered = sum(r["offered"] for r in mine)
                shares.append(sum(r["outcomes"].get(partition.value, 0) for r in mine) / offered if offered else 0.0)
            if any(shares):
                label = partition.value.replace("_", " ")
                axis.barh(range(len(arms)), shares, left=left, color=colour, height=0.6, label=label)
                left = [a + b for a, b in zip(left, shares, strict=True)]
        axis.set_yticks(range(len(arms)), arms)
        axis.invert_yaxis()
        axis.set_xlim(0, 1)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
        axis.set_xlabel("share of all offered requests")
        axis.grid(axis="y", visible=False)
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _values(runs: Sequence[Run], arm: str, load: float | None, key: str, inside: str | None = None) -> list[float]:
    found = []
    for run in runs:
        if run["policy"] == arm and (load is None or float(run["load"]) == load):
            value = (run.get(inside) or {}).get(key) if inside else run.get(key)
            if value is not None:
                found.append(float(value))
    return found


def _time(value: float, _: int) -> str:
    return f"{value:g} s" if value >= 1.0 else f"{value * 1e3:g} ms"
