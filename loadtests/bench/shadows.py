"""`python -m loadtests.bench shadow`: CPU that two shadow policies add to a request of the whole gateway.

The gateway with everything on, alone, with two shadows at the default share of sessions, and with them asked about
every request, in turn in the same rounds. Bar: at the default share at most 1.15 times the gateway alone.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gateway.experiment_table import Shadow
from loadtests.bench import cost
from loadtests.bench.contenders import FOREBAY, Contender, forebay

MOST = 1.15
PAIR = ("cache_aware", "least_work")  # one with a text tree of its own, one without memory


def run(quick: bool, policies: Sequence[str], console: Console) -> bool:
    """True when the bar holds."""
    usual = Shadow().share
    with tempfile.TemporaryDirectory() as folder:
        alone = forebay("forebay")
        contenders = [alone, *(_with(policies, share, Path(folder)) for share in (usual, 1.0))]
        rounds, round_s = (3, 1.0) if quick else (7, 3.0)
        wanted = [s for s in cost.SCENARIOS if s.name in ("short request", "32 KB prompt")]
        results = cost.measure(contenders, wanted, rounds, round_s, console)
    table = Table(title=f"shadows {' and '.join(policies)}: us of CPU a request, and beside the same round without")
    for column in ("", *(c.name for c in contenders), f"at most {MOST:g}"):
        table.add_column(column, justify="right")
    holds = True
    for scenario in wanted:
        rows = [results[scenario.name][c.name] for c in contenders]
        ratios = [statistics.median(a / b for a, b in zip(row.us, rows[0].us, strict=True)) for row in rows]
        met = ratios[1] <= MOST and not any(row.errors for row in rows)
        holds &= met
        cells = (f"{row.median_us:.1f} ({ratio:.2f})" for row, ratio in zip(rows, ratios, strict=True))
        table.add_row(scenario.name, *cells, "[green]met" if met else "[red]missed")
    console.print(table)
    return holds


def _with(policies: Sequence[str], share: float, folder: Path) -> Contender:
    listed = ", ".join(f'"{name}"' for name in policies)

    def argv(port: int, urls: Sequence[str]) -> list[str]:
        path = folder / f"{share:g}.toml"
        replicas = "".join(f'[[replicas]]\nurl = "{url}"\n' for url in urls)
        path.write_text(f"[shadow]\npolicies = [{listed}]\nshare = {share}\n{replicas}")
        return [*FOREBAY, "serve", "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]

    return Contender(f"shadows of {share:.0%}", argv)
