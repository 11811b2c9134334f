"""What a live run looks like in a terminal: a progress bar with live goodput, and the table at its end.

The bar's goodput is good answers over the time passed since the window opened; the result divides by W + D.
Numbers that a run does not have (it is invalid, or nothing was measured) are shown as a dash, never as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from loadtests.schedule import Schedule
from loadtests.senders import Progress as Sent

DASH = "–"
FEW_ERRORS = 3
KEY_NEEDED = "the key of a client is read from the environment variable FOREBAY_API_KEY"


@contextmanager
def bar(console: Console, title: str, schedule: Schedule, time_scale: float = 1.0) -> Iterator[Callable[[Sent], None]]:
    """Yields what to call with each report of the senders. Its time is that of the schedule."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    horizon_s = schedule.window_s + schedule.drain_s
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=horizon_s, numbers="starting")

        def show(sent: Sent) -> None:
            at_s = max(0.0, min(sent.at_s, horizon_s))
            rate = sent.tally.good / at_s if at_s > 0 else 0.0
            numbers = (
                f"goodput {rate:5.2f}/s  good {sent.tally.good}/{sent.tally.due}  shed {sent.tally.shed}  "
                f"errors {sent.tally.errors}  in flight {sent.in_flight}"
            )
            progress.update(task, completed=at_s, numbers=numbers)

        yield show


def seconds(value: float | None) -> str:
    """A time for people: 83 ms, 1.24 s."""
    if value is None:
        return DASH
    return f"{value * 1e3:.0f} ms" if value < 1.0 else f"{value:.2f} s"


def share(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"


def number(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def per_s(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:.{digits}f} /s"


def run_table(runs: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Runs as columns, figures as rows: a few arms are compared at a glance."""
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(str(run["policy"]), justify="right")
    lines: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("verdict", lambda r: _verdict(r)),
        ("attainment", lambda r: share(r["attainment"])),
        ("goodput, latency-qualified", lambda r: per_s(r["goodput_rps"])),
        ("good / offered", lambda r: f"{DASH if r['good'] is None else r['good']} / {r['offered']}"),
        ("shed / late but complete", lambda r: f"{r['shed']} / {r['late_complete']}"),
        ("unfinished / behind a failed turn", _never),
        ("errors", lambda r: share(r["error_rate"])),
        ("TTFT p50 / p90 / p99", lambda r: _spread(r["ttft_s"])),
        ("TPOT p50 / p90 / p99", lambda r: _spread(r["tpot_s"])),
        ("longest gap p99", lambda r: seconds(r["longest_gap_s"]["p99"])),
        ("answers measured", lambda r: str(r["ttft_s"]["n"])),
        ("prompt tokens from cache", lambda r: share(r["reuse"]["achieved"])),
        ("  ceiling of the workload", lambda r: share(r["reuse"]["ceiling"])),
        ("  own / external cache", _caches),
        ("completed", lambda r: per_s(r["complete_rps"])),
        ("output tokens", lambda r: per_s(r["output_tokens_per_s"], 0)),
        ("client attempts per request", lambda r: number(r["attempts"]["amplification"])),
        ("generator lag p99", lambda r: seconds(r["sustained"]["lag_p99_s"])),
    ]
    for name, read in lines:
        table.add_row(name, *(read(run) for run in runs))
    return table


def _caches(run: Mapping[str, Any]) -> str:
    return " / ".join(share(run["reuse"].get(name)) for name in ("own_cache", "external_cache"))


def _never(run: Mapping[str, Any]) -> str:
    """What neither answered nor was refused: still open when the drain ended, or a turn whose turn before failed."""
    return " / ".join(str(run["outcomes"][name]) for name in ("unfinished", "not_dispatched"))


def _verdict(run: Mapping[str, Any]) -> str:
    word = str(run["verdict"]).upper()
    return f"[green]{word}[/green]" if word == "VALID" else f"[red]{word}[/red]"


def _spread(values: Mapping[str, float | None]) -> str:
    return " / ".join(seconds(values[q]) for q in ("p50", "p90", "p99"))


def print_reasons(console: Console, runs: Sequence[Mapping[str, Any]]) -> None:
    """Why runs are invalid, and the view where it is not the usual one."""
    for run in runs:
        for reason in run["reasons"]:
            console.print(f"[red]INVALID[/red] {run['policy']}: {reason}", highlight=False)
        if run.get("view") == "response-paced":
            console.print(f"{run['policy']}: response-paced; the load fell when the server slowed", highlight=False)


def print_errors(console: Console, runs: Sequence[Mapping[str, Any]]) -> None:
    """What the server said, where more than a few requests ended in errors or were shed, or no answer was whole."""
    for run in runs:
        told = run.get("top_errors") or []
        if sum(one["count"] for one in told) <= FEW_ERRORS and run["complete_rps"]:
            continue
        for one in told:
            status = "no answer" if one["http"] is None else f"{one['http']}"
            line = f"{run['policy']}: {one['count']} x {status} {one['reason']}"
            line += f": {one['message']}" if one["message"] else ""
            line += f" ({KEY_NEEDED})" if one["http"] == 401 else ""
            console.print(line, highlight=False, markup=False, soft_wrap=True)
