"""`python -m loadtests.bench`: what the gateway costs, beside vllm-router in the same run.

Example: python -m loadtests.bench --quick
         python -m loadtests.bench soak
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gateway.version import built
from loadtests import terminal
from loadtests.bench import cost, decisions, fetching, held, memory
from loadtests.bench import workers as several
from loadtests.bench.churn import churn
from loadtests.bench.contenders import Contender, forebay, router_executable, vllm_router
from loadtests.bench.processes import NotReadyError
from loadtests.bench.soak import MOST_BYTES_PER_STREAM, MOST_HEALTH_S, soak
from loadtests.ports import free_ports

app = typer.Typer(add_completion=False, invoke_without_command=True)
console = terminal.console()
QUICK_ROUNDS, ROUNDS = 3, 15
ROUND_S = 1.0  # many short rounds: what else a machine does comes in seconds


Named = Annotated[list[str] | None, typer.Option("--scenario", help="only scenarios whose name holds this text")]


def scenarios(named: list[str] | None) -> list[cost.Scenario]:
    """Those whose name holds one of the texts."""
    wanted = [s for s in cost.SCENARIOS if not named or any(text in s.name for text in named)]
    if not wanted:
        console.print(f"--scenario: none of {', '.join(s.name for s in cost.SCENARIOS)} holds {named}")
        raise typer.Exit(2)
    return wanted


@app.callback()
def run(
    context: typer.Context,
    quick: Annotated[bool, typer.Option(help="3 rounds of 1 s instead of 15")] = False,
    policy: Annotated[
        list[str] | None, typer.Option(help="policy of our gateway; again for more (forebay: everything on)")
    ] = None,
    scenario: Named = None,
    router: Annotated[bool, typer.Option(help="measure vllm-router beside it")] = True,
    out: Annotated[Path | None, typer.Option(help="write the numbers as JSON into this file")] = None,
) -> None:
    """CPU time per request and per streamed event, beside vllm-router; exit status 1 if a bar is missed.

    Example: python -m loadtests.bench --quick --policy forebay
    """
    if context.invoked_subcommand is not None:
        return
    wanted = scenarios(scenario)
    contenders: list[Contender] = [forebay(name) for name in policy or ["round_robin", "least_request", "forebay"]]
    if router:
        executable = router_executable(console)
        ports = free_ports(2)
        contenders += [
            vllm_router("round_robin", executable, ports[0]),
            vllm_router("cache_aware", executable, ports[1]),
        ]
    rounds = QUICK_ROUNDS if quick else ROUNDS
    try:
        results = cost.measure(contenders, wanted, rounds, ROUND_S, console)
    except NotReadyError as failure:
        console.print(f"[red]{failure}")
        raise typer.Exit(1) from None
    met = show(results)
    if out is not None:
        out.write_text(json.dumps(as_json(results, rounds, ROUND_S), indent=1) + "\n")
    raise typer.Exit(0 if met else 1)


def show(results: cost.Results, bars_: Sequence[cost.Bar] = cost.BARS) -> bool:
    """Prints the tables; True if every bar that was measured is met and nothing failed."""
    table = Table(title=f"us of CPU (median of the rounds) | thousands a second; forebay: {built()}")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    rows = next(iter(results.values()))
    for contender in rows:
        cells = (results[s][contender] for s in results)
        table.add_row(contender, *(f"{m.median_us:.1f} | {statistics.median(m.per_s) / 1000:.1f}" for m in cells))
    console.print(table)
    met = True
    bars = Table(title="bars: ratio of the same round, median (least to most)")
    for column in ("", "contender", "beside", "ratio", "at most", ""):
        bars.add_column(column)
    for bar in bars_:
        values = cost.ratios(results, bar)
        if not values:
            continue
        ratio = statistics.median(values)
        holds = ratio <= bar.at_most
        met &= holds
        spread = f"{ratio:.2f} ({min(values):.2f} to {max(values):.2f})"
        verdict = "[green]met" if holds else "[red]missed"
        bars.add_row(bar.scenario, bar.contender, bar.beside, spread, f"{bar.at_most:g}", verdict)
    console.print(bars)
    for name, row in results.items():
        for contender, measured in row.items():
            if measured.errors:
                console.print(
                    f"[red]INVALID: {contender}, {name}: {measured.errors} errors, first: {measured.first_error}"
                )
                met = False
    return met


def as_json(results: cost.Results, rounds: int, round_s: float) -> dict[str, Any]:
    return {
        "us_of_cpu": {s: {c: m.us for c, m in row.items()} for s, row in results.items()},
        "per_s": {s: {c: m.per_s for c, m in row.items()} for s, row in results.items()},
        "errors": {s: {c: m.errors for c, m in row.items()} for s, row in results.items()},
        "provenance": {
            "command": "python -m loadtests.bench",
            "forebay": built(),
            "rounds": rounds,
            "round_s": round_s,
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    }


@app.command("churn")
def churn_command(
    changes: Annotated[int, typer.Option(help="replicas added and removed")] = 1000,
    seconds: Annotated[float, typer.Option(help="time they are spread over")] = 60.0,
    workers: Annotated[int, typer.Option(min=1, help="processes of the gateway that carry requests")] = 1,
    replicas: Annotated[int, typer.Option(min=2, help="simulated replicas")] = 8,
) -> None:
    """1,000 changes of membership in a minute under streams: what is lost and left over; exit status 1 if anything.

    Example: python -m loadtests.bench churn --workers 2
    """
    try:
        found = churn(changes, seconds, workers, replicas, console)
    except NotReadyError as failure:
        console.print(f"[red]{failure}")
        raise typer.Exit(1) from None
    for line in found.lines():
        console.print(line, markup=False)
    console.print("[green]holds" if found.holds else "[red]does not hold")
    raise typer.Exit(0 if found.holds else 1)


@app.command("soak")
def soak_command(
    streams: Annotated[int, typer.Option(help="streams open at once")] = 2000,
    seconds: Annotated[float, typer.Option(help="how long each stream lasts")] = 30.0,
    policy: Annotated[str, typer.Option(help="policy of the gateway")] = "forebay",
    router: Annotated[bool, typer.Option(help="put vllm-router (round_robin) in its place")] = False,
    workers: Annotated[int, typer.Option(help="workers of the gateway; above 1 it may use both cores")] = 1,
    rate: Annotated[float, typer.Option(help="events per second and stream")] = 5.0,
    replicas: Annotated[int, typer.Option(min=1, help="replicas, all of them one process")] = 2,
    config: Annotated[Path | None, typer.Option(help="configuration of the gateway")] = None,
) -> None:
    """2,000 streams of 5 events a second on one process: errors, memory per stream, /health; exit status 1 if it fails.

    Example: python -m loadtests.bench soak --seconds 60

    Example: python -m loadtests.bench soak --workers 2 --streams 10000 --rate 1 --policy least_request

    At one event a second no stream keeps the TPOT objective of a default class, and a policy that paces then lets few
    prompts through to each replica: give it many, or classes without that objective.
    """
    ours = forebay(policy, workers, config)
    contender = vllm_router("round_robin", router_executable(console), free_ports(1)[0]) if router else ours
    try:
        result = soak(contender, streams, seconds, console, rate, both_cores=workers > 1, fleet=replicas)
    except NotReadyError as failure:
        console.print(f"[red]{failure}")
        raise typer.Exit(1) from None
    assert result.run is not None
    health = sorted(result.health_s) or [float("nan")]
    run_ = result.run
    console.print(
        f"{contender.name}: {run_.answers} of {streams} streams whole, {run_.errors} errors {run_.first_error}"
    )
    if result.refused:
        console.print(f"not served: {', '.join(f'{n} {reason}' for reason, n in result.refused.items())}")
    console.print(
        f"{run_.events} events in {run_.seconds:.1f} s, gateway busy {result.cpu_s / run_.seconds:.0%} of one core"
    )
    kib, most_kib = result.bytes_per_stream / 1024, MOST_BYTES_PER_STREAM / 1024
    console.print(
        f"memory per stream {kib:.1f} KiB (bar {most_kib:.0f}), "
        f"{result.idle_bytes >> 20} to {result.peak_bytes >> 20} MiB in all"
    )
    worst, p50 = health[-1] * 1000, statistics.median(health) * 1000
    console.print(
        f"/health {len(health)} times: median {p50:.1f} ms, worst {worst:.1f} ms (bar {MOST_HEALTH_S * 1000:.0f}), "
        f"{result.health_failures} failed"
    )
    console.print("[green]holds" if result.holds else "[red]does not hold")
    raise typer.Exit(0 if result.holds else 1)


@app.command("workers")
def workers_command(
    workers: Annotated[int, typer.Option(help="workers that are measured beside one process")] = 2,
    policy: Annotated[str, typer.Option(help="policy of the gateway")] = "forebay",
    quick: Annotated[bool, typer.Option(help="3 rounds of 1 s instead of 15")] = False,
    scenario: Named = None,
    settle: Annotated[float, typer.Option(min=0, help="seconds each is loaded before; 0: gateways that start")] = 25.0,
) -> None:
    """CPU per request and event of several workers and their core beside one process; exit status 1 on a missed bar.

    Example: python -m loadtests.bench workers --quick

    Example: python -m loadtests.bench workers --scenario "400 KB" --settle 0
    """
    rounds = QUICK_ROUNDS if quick else ROUNDS
    wanted = scenarios(scenario)
    try:
        results = several.beside_one(policy, workers, wanted, rounds, ROUND_S, console, settle)
        far = several.distance(policy, workers, *((1, 2.0) if quick else (5, 6.0)), console)
    except NotReadyError as failure:
        console.print(f"[red]{failure}")
        raise typer.Exit(1) from None
    met = show(results, several.bars(results, policy, workers))
    p50, p99, p999 = (far.quantile(q) * 1e3 for q in (0.5, 0.99, 0.999))
    near = far.quantile(0.99) <= several.MOST_P99_S
    each = ", ".join(f"{one.quantile(0.99) * 1e3:g}" for one in far.took)
    console.print(
        f"decision of the core at {far.rate:.0f} requests/s (half load; {far.full:.0f} in a closed loop), of the "
        f"middle of {len(far.took)} runs: median up to {p50:g} ms, p99 up to {p99:g} ms (runs: {each}; bar "
        f"{several.MOST_P99_S * 1e3:g} ms) {'[green]met' if near else '[red]missed'}[/], p99.9 up to {p999:g} ms"
    )
    if far.errors:
        console.print(f"[red]INVALID: {far.errors} errors while the distance was measured")
    raise typer.Exit(0 if met and near and not far.errors else 1)


@app.command("memory")
def memory_command(
    requests: Annotated[
        int, typer.Option(min=memory.LOOKS, help="requests, no two of the same prompt")
    ] = memory.REQUESTS,
    workers: Annotated[int, typer.Option(min=1, help="processes of the gateway that carry requests")] = 1,
    policy: Annotated[str, typer.Option(help="policy of the gateway")] = "forebay",
) -> None:
    """Memory of a gateway that goes on serving, process by process; exit status 1 if it goes on growing.

    Example: python -m loadtests.bench memory --workers 2
    """
    try:
        found = memory.measure(forebay(policy, workers), requests, console)
    except NotReadyError as failure:
        console.print(f"[red]{failure}")
        raise typer.Exit(1) from None
    grown = ", ".join(f"{name} {ratio - 1:+.1%}" for name, ratio in found.growth.items())
    console.print(
        f"the last third beside the third before: {grown} (bar +{memory.MOST_GROWTH - 1:.0%}); {found.failed} failed"
    )
    console.print("[green]holds" if found.holds else "[red]does not hold")
    raise typer.Exit(0 if found.holds else 1)


@app.command("partition")
def partition_command(
    seconds: Annotated[float, typer.Option(help="how long clients stream, all in all")] = 30.0,
    dropped: Annotated[float, typer.Option(help="how long packets of one gateway are dropped")] = 8.0,
) -> None:
    """One gateway of two is cut off by a network namespace whose packets are dropped; exit status 1 if it fails.

    Example: python -m loadtests.bench partition --seconds 40 --dropped 12
    """
    from loadtests.bench.partition import partition

    try:
        found = partition(seconds, dropped, console)
    except (subprocess.CalledProcessError, FileNotFoundError, TimeoutError) as failure:
        said = getattr(failure, "stderr", None)
        console.print(f"[red]{failure}{'' if not said else ': ' + said.decode().strip()}", highlight=False)
        raise typer.Exit(1) from None
    for name, seen in found.outcomes.items():
        outcomes = ", ".join(f"{n} {kind}" for kind, n in seen.most_common())
        console.print(f"{name}: {outcomes}; {found.recorded[name]:.0f} records", highlight=False)
    console.print(f"all known to all {found.back_s:.1f} s after; left over: {', '.join(found.left) or 'nothing'}")
    console.print("[green]holds" if found.holds else "[red]does not hold")
    raise typer.Exit(0 if found.holds else 1)


@app.command("pair")
def pair_command(before: Path, after: Path) -> None:
    """Goodput and cached share of two runs of `forebay simulate` on equal seeds, the second against the first.

    Example: python -m loadtests.bench pair runs/one-process runs/four-hands
    """
    from loadtests.bench import pair

    try:
        for line in pair.lines(before, after):
            console.print(line, highlight=False)
    except (OSError, KeyError, ValueError) as failure:
        console.print(f"[red]{failure}", highlight=False)
        raise typer.Exit(1) from None


@app.command("decisions")
def decisions_command(
    arm: Annotated[list[str] | None, typer.Option(help="arm to measure; again for more")] = None,
    quick: Annotated[bool, typer.Option(help="3 rounds of 300 submits instead of 9 of 2,000")] = False,
    out: Annotated[Path | None, typer.Option(help="write the numbers as JSON into this file")] = None,
) -> None:
    """CPU of one decision, of the prefix chain and of matching, and the index's memory; exit status 1 on a missed bar.

    Example: python -m loadtests.bench decisions --quick --arm forebay --arm round_robin
    """
    met = decisions.run(arm or ["forebay", "forebay+admission"], quick=quick, out=out, console=console)
    raise typer.Exit(0 if met else 1)


@app.command("held")
def held_command(quick: Annotated[bool, typer.Option(help="300 rounds instead of 2,000")] = False) -> None:
    """What 2,000 held requests add to the p99 of the admitted ones; exit status 1 on a missed bar.

    Example: python -m loadtests.bench held --quick
    """
    raise typer.Exit(0 if held.run(quick=quick, console=console) else 1)


@app.command("fetch")
def fetch_command(
    quick: Annotated[bool, typer.Option(help="3 rounds of 100 pages instead of 9 of 1,000")] = False,
) -> None:
    """What a page of a replica costs beside httpx; exit status 1 on a missed bar.

    Example: python -m loadtests.bench fetch --quick
    """
    raise typer.Exit(0 if fetching.run(quick=quick, console=console) else 1)


@app.command("experiments")
def experiments_command(
    repetitions: Annotated[int, typer.Option(help="repetitions of each design", min=20)] = 1000,
    hours: Annotated[float, typer.Option(help="length of each in hours of traffic", min=0.5)] = 1.0,
    guard_runs: Annotated[int, typer.Option(help="runs of each arm under guard rails", min=1)] = 200,
    out: Annotated[Path | None, typer.Option(help="write the numbers as JSON into this file")] = None,
) -> None:
    """Coverage of the experiments' intervals, false differences and guard rails; exit status 1 if a bar is missed.

    Example: python -m loadtests.bench experiments --repetitions 100
    """
    from loadtests.bench import experiments

    raise typer.Exit(0 if experiments.run(repetitions, hours * 3600.0, guard_runs, out, console) else 1)


@app.command("shadow")
def shadow_command(
    quick: Annotated[bool, typer.Option(help="3 rounds of 1 s instead of 7 of 3 s")] = False,
    policy: Annotated[list[str] | None, typer.Option(help="a shadow policy; again for more")] = None,
) -> None:
    """CPU that shadow policies add to a request; exit status 1 if it is more than 15 %.

    Example: python -m loadtests.bench shadow --quick
    """
    from loadtests.bench import shadows

    raise typer.Exit(0 if shadows.run(quick, policy or shadows.PAIR, console) else 1)


if __name__ == "__main__":
    app()
