"""`python -m loadtests.bench experiments`: do the intervals hold, do guard rails stop what they should?

Prints three tables: the queue model beside the engine model, each design against the known truth, and the guard rails.
Bars: an interval covers the truth in at least 93 % of repetitions (plain A/B is shown for its bias and has no bar),
A/A reports a false difference in at most 6.5 %; every bad arm is stopped within 60 s, of 200 good ones at most 5.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtests.experiment_check import LOOKS, Check, check
from loadtests.experiment_engine import Agreement, agreement
from loadtests.experiment_guard import KINDS, PLANS, Stops, stops
from loadtests.experiment_model import AFFINITY, SPREAD, World, traffic

COVERS, FALSE, BAD_WITHIN_S, GOOD_STOPS = 0.93, 0.065, 60.0, 5
ENGINE_S, ENGINE_RUNS, ENGINE_SEED = 600.0, 2, 20_260_103
MOST_APART = 0.025  # in attainment of one policy, model against engine


def run(repetitions: int, seconds: float, guard_runs: int, out: Path | None, console: Console) -> bool:
    """True when every bar holds."""
    began = time.perf_counter()
    world = World()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        line = bar.add_task("engines", total=1.0)
        load = traffic(world, ENGINE_S, ENGINE_RUNS, np.random.default_rng(ENGINE_SEED))
        agreed = []
        for r in range(ENGINE_RUNS):
            agreed.append(agreement(world, load, r, ENGINE_S))
            bar.update(line, completed=(r + 1) / ENGINE_RUNS)
        line = bar.add_task("designs", total=1.0)
        checked = check(world, repetitions, seconds, progress=lambda share: bar.update(line, completed=share))
        judged = []
        for design, kind in itertools.product(PLANS, KINDS):
            line = bar.add_task(f"guard rails, {design}, {kind}", total=1.0)
            last = 90.0 if kind.startswith("bad") else 600.0
            judged.append(
                stops(
                    kind,
                    guard_runs,
                    last,
                    progress=lambda share, at=line: bar.update(at, completed=share),  # type: ignore[misc]
                    design=design,
                )
            )
    held = [_engines(agreed, console), _designs(checked, console), _guards(judged, console)]
    console.print(f"{time.perf_counter() - began:.0f} s; seeds are fixed, so the same command prints the same numbers")
    if out is not None:
        out.write_text(json.dumps(_document(agreed, checked, judged), indent=1) + "\n")
    return all(held)


def _engines(agreed: list[Agreement], console: Console) -> bool:
    table = Table(title=f"queue and engine model, same choices, {ENGINE_S:g} s of traffic: attainment (mean TTFT)")
    for column in ("run", "policy", "model", "engine", "apart", f"at most {MOST_APART:g}"):
        table.add_column(column, justify="right")
    holds = True
    for r, found in enumerate(agreed):
        for policy, name in ((SPREAD, "spread"), (AFFINITY, "affinity")):
            (share, ttft), (seen, seen_ttft) = found.model[policy], found.engine[policy]
            met = abs(share - seen) <= MOST_APART
            holds &= met
            table.add_row(
                f"{r}", name, f"{share:.3f} ({ttft:.3f} s)", f"{seen:.3f} ({seen_ttft:.3f} s)",
                f"{share - seen:+.3f}", _verdict(met),
            )  # fmt: skip
    console.print(table)
    return holds


def _designs(found: Check, console: Console) -> bool:
    table = Table(
        title=f"{found.repetitions} repetitions of {found.seconds / 3600:g} h; attainment of the control "
        f"{found.control:.3f}, true difference {found.truth:+.4f}"
    )
    for column in ("design", "estimate", "bias", "95 % covers", f"at all {LOOKS} looks", "half width", "look-once half",
                   "A/A false, any look", "CUPED takes", ""):  # fmt: skip
        table.add_column(column, justify="right")
    holds = True
    for name, row in found.rows.items():
        mean, barred = float(np.mean(row.estimates)), name != "plain A/B"
        met = row.covers(found.truth) >= COVERS and row.false_share <= FALSE
        holds &= met or not barred
        table.add_row(
            name, f"{mean:+.4f}", f"{mean - found.truth:+.4f}", f"{row.covers(found.truth):.1%}",
            f"{row.always(found.truth):.1%}", f"{np.mean(row.halves):.4f}", f"{np.mean(row.halves_once):.4f}",
            f"{row.false_share:.1%}", f"{np.mean(row.reduced):.0%}", _verdict(met) if barred else "for its bias",
        )  # fmt: skip
    console.print(table)
    return holds


def _guards(found: list[Stops], console: Console) -> bool:
    table = Table(title="guard rails, 20 requests a second, begun anywhere within the slices")
    for column in ("design", "arm", "runs", "stopped", "within 60 s", "median", "latest", ""):
        table.add_column(column, justify="right")
    holds = True
    for one in found:
        bad = one.kind.startswith("bad")
        met = one.within_60 == one.runs if bad else len(one.at_s) <= GOOD_STOPS * one.runs / 200
        holds &= met
        times = (f"{np.median(one.at_s):.0f} s", f"{max(one.at_s):.0f} s") if one.at_s else ("", "")
        table.add_row(
            one.design, one.kind, f"{one.runs}", f"{len(one.at_s)}", f"{one.within_60}", *times, _verdict(met)
        )
    console.print(table)
    return holds


def _verdict(met: bool) -> str:
    return "[green]met" if met else "[red]missed"


def _document(agreed: list[Agreement], checked: Check, judged: list[Stops]) -> dict[str, object]:
    return {
        "engines": [{"model": a.model, "engine": a.engine} for a in agreed],
        "repetitions": checked.repetitions,
        "seconds": checked.seconds,
        "truth": checked.truth,
        "designs": {
            name: {
                "estimate": float(np.mean(row.estimates)),
                "covers": row.covers(checked.truth),
                "covers_at_all_looks": row.always(checked.truth),
                "half_width": float(np.mean(row.halves)),
                "half_width_once": float(np.mean(row.halves_once)),
                "false_share": row.false_share,
                "variance_reduced": float(np.mean(row.reduced)),
            }
            for name, row in checked.rows.items()
        },
        "guards": [{"design": s.design, "kind": s.kind, "runs": s.runs, "stopped_at_s": s.at_s} for s in judged],
    }
