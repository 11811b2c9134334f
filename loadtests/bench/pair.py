"""Two runs of `forebay simulate` on the same seeds, side by side: what differs is how the gateways were set up.

`simulate` compares policies within one set-up; whether four workers or two gateways cost anything is asked of two.
Goodput and the cached share of prompt tokens, paired by load and seed, with the interval of the mean difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policies.statistics import paired

Run = Mapping[str, Any]


def lines(before: Path, after: Path) -> list[str]:
    """Raises ValueError where a block is not the same on both sides, or is on one side only."""
    one, other = _runs(before), _runs(after)
    if one.keys() != other.keys():
        raise ValueError(f"{before} and {after} have not run the same policies, loads and seeds")
    for key, run in one.items():
        if run["schedule_sha256"] != other[key]["schedule_sha256"]:
            raise ValueError(f"{key}: the schedules differ, so nothing can be paired")
    out = []
    for policy, load in dict.fromkeys(key[:2] for key in one):
        keys = [key for key in one if key[:2] == (policy, load)]
        for name in ("goodput /s", "cached share"):
            a, b = ([_measured(runs[key], name) for key in keys] for runs in (one, other))
            found = paired(a, b).student
            base = sum(a) / len(a)
            share = [100.0 * x / base for x in (found.estimate, found.low, found.high)]
            out.append(
                f"{policy}, load {load:g}, {len(keys)} seeds, {name}: {base:.4g} -> {sum(b) / len(b):.4g}, "
                f"{share[0]:+.1f} % [{share[1]:+.1f}, {share[2]:+.1f}]"
            )
    return out


def _measured(run: Run, name: str) -> float:
    return float(run["goodput_rps"] if name == "goodput /s" else run["reuse"]["achieved"])


def _runs(folder: Path) -> dict[tuple[str, float, int], Run]:
    document = json.loads((folder / "summary.json").read_text())
    return {(run["policy"], run["load"], run["seed"]): run for run in document["runs"]}
