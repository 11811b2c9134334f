"""`forebay simulate`: arms against engine models in virtual time, on equal schedules, with intervals.

An operator decides on policies and GPUs by this, so everything that could flatter is excluded: window and drain are
fixed and equal, the denominator is what was scheduled, arms are paired by seed, percentiles name their populations.
The profiles are third-party figures until `forebay calibrate` has fitted one: read ratios, not seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gateway import config as gateway_config
from loadtests import counterfactual, pairing, profiles, provenance, results, tables, terminal
from loadtests.bound import upper_bound
from loadtests.campaign import ORACLE, Campaign, Fleet, Task, run_all, unbounded
from loadtests.offer import OBJECTIVE_HELP, offer
from loadtests.results import ConservationError
from loadtests.scenario import parse_incident
from loadtests.schedule import ScheduleError
from policies import POLICIES
from policies.arms import Arm, parse
from policies.settings import Settings

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay" / "oracle"
UNBOUNDED = " (no size bound)"


class UsageError(ValueError):
    """Something on the command line cannot be; the text names it. Exit status 2."""


BAD_USAGE = (UsageError, ScheduleError, gateway_config.ConfigError, ValueError)


def simulate(
    out: Annotated[Path, typer.Option(help="Folder for summary.json, requests.jsonl and the schedules.")],
    window: Annotated[float, typer.Option(help="Arrival window W in seconds; requests scheduled in it are counted.")],
    workload: Annotated[str | None, typer.Option(help="A built-in workload: chat, coding, rag, unique, ...")] = None,
    trace: Annotated[Path | None, typer.Option(help="A public trace or a gateway journal, plain or .gz.")] = None,
    trace_format: Annotated[str | None, typer.Option("--format", help="Format of the trace, if not seen.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="ARM = NAME[+admission][+pacing]; the first is the reference. Default: round_robin, forebay."
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(help="Simulated replicas.", min=1)] = 8,
    load: Annotated[str, typer.Option(help="Multiples of the source's own rate, like 0.5,1,1.5.")] = "1",
    drain: Annotated[float | None, typer.Option(help="D; default: the longest an on-time request may take.")] = None,
    seeds: Annotated[int, typer.Option(help="Blocks: pieces of the source; 5 or more for a claim.", min=1)] = 5,
    first_seed: Annotated[int, typer.Option(help="The seeds are this one and the following.", min=0)] = 0,
    config: Annotated[Path | None, typer.Option(help="Gateway configuration: its classes and settings.")] = None,
    profile: Annotated[
        str, typer.Option(help="Step times: a built-in name, a file of `forebay calibrate`, or several, dealt in turn.")
    ] = "a100-8b",
    max_batched_tokens: Annotated[int | None, typer.Option(help="Token budget of a step.", min=1)] = None,
    objective: Annotated[list[str] | None, typer.Option(help=OBJECTIVE_HELP)] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Add the oracle and the upper bound (many times slower).")
    ] = False,
    without_bound: Annotated[
        bool, typer.Option("--without-size-bound", help="Run shedding arms also without the size-fairness bound.")
    ] = False,
    gateways: Annotated[
        int, typer.Option(help="Gateways that share the fleet, each seeing its own requests.", min=1)
    ] = 1,
    peers: Annotated[bool, typer.Option("--peers", help="Gateways tell each other their load.")] = False,
    shared_index: Annotated[bool, typer.Option("--shared-index", help="Gateways share a sparse prefix index.")] = False,
    hands: Annotated[
        int, typer.Option(help="Workers of each gateway, their core a message away; 0: one process.", min=0)
    ] = 0,
    scrape_age: Annotated[
        float, typer.Option(help="Age of scraped values when they arrive, in seconds.", min=0.0)
    ] = 0.0,
    patience: Annotated[bool, typer.Option("--patience", help="Clients leave once their answer must be late.")] = False,
    incident: Annotated[
        list[str] | None, typer.Option(help="slow:3@60x2, lost:0@120, restarted:1@60+30 or added:8@100.")
    ] = None,
    thin: Annotated[float, typer.Option(help="Share of a trace's prefix groups to keep.", min=0.0001, max=1.0)] = 1.0,
    longest_prompt: Annotated[int | None, typer.Option(help="Leave out longer prompts of a trace.", min=1)] = None,
    think_cap: Annotated[float | None, typer.Option(help="Cut think times of a trace to this, in s.", min=0.0)] = None,
    max_turns: Annotated[int | None, typer.Option(help="Cut sessions of a trace to their first turns.", min=1)] = None,
    pace: Annotated[
        float | None,
        typer.Option(help="A fixed share of time in prefill, not the learnt pace.", min=0.01, max=1.0),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes; default: one per core.", min=1)] = None,
) -> None:
    """Compare routing policies on simulated replicas, in virtual time.

    Exit status 0 on success, 1 when a run is INVALID (its books do not balance), 2 on bad usage.

    Example: forebay simulate --workload chat --replicas 8 --policy round_robin --policy forebay --load 0.5,1,2
    --window 300 --seeds 5 --objective ttft=2s+0.25ms/token,tpot=80ms --out runs/chat

    Example: forebay simulate --trace journal.jsonl --config gateway.toml --replicas 4 --policy forebay
    --policy least_work --seeds 1 --window 600 --out runs/yesterday     (a journal: what would others have done?)
    """
    console = terminal.console()
    began = time.perf_counter()
    try:
        settings, policy_settings, classes = _configured(config)
        settings = settings if pace is None else replace(settings, pace=pace)
        made = offer(
            workload, trace, window_s=window, drain_s=drain, objectives=objective or (), form=trace_format,
            thin_to=thin, longest_prompt=longest_prompt, think_cap_s=think_cap, max_turns=max_turns, classes=classes,
        )  # fmt: skip
        arms = _arms(policy or ["round_robin", "forebay"], settings, without_bound)
        kinds = [profiles.load(name.strip()) for name in profile.split(",")]
        fleet = Fleet(
            tuple(kinds[i % len(kinds)] for i in range(replicas)), max_batched_tokens, gateways, scrape_age, peers,
            shared_index, patience, hands, tuple(parse_incident(text) for text in incident or ()),
        )  # fmt: skip
        loads = parse_loads(load)
        reference = _oracle_arm(settings) if oracle else None
        campaign = Campaign(made, fleet, arms, policy_settings, reference, CACHE if oracle else None)
        campaign.check(loads)
        tasks = campaign.tasks(loads, range(first_seed, first_seed + seeds))
        fleet.scenario(made.schedule(first_seed, loads[0]))
        results.ready(out)
    except BAD_USAGE as error:
        typer.echo(f"forebay simulate: {error}", err=True)
        raise typer.Exit(2) from None
    try:
        entries = _run(console, campaign, tasks, min(jobs or os.cpu_count() or 1, len(tasks)), out)
    except ConservationError as error:
        typer.echo(f"forebay simulate: INVALID: {error}", err=True)
        raise typer.Exit(1) from None
    comparisons = pairing.compare_all(entries) if len(arms) + oracle > 1 else []
    origin = provenance.here() | {
        "wall_s": round(time.perf_counter() - began, 2),
        "source": made.source.file or made.source.name,
        "source_sha256": made.source.sha256,
        "source_notes": list(made.source.notes),
        "classes": {name: results.finite(_fields(c)) for name, c in sorted(made.classes.items())},
        "arms": {name: results.finite(_fields(arm.settings)) for name, arm in arms.items()},
        "profiles": [_fields(p) for p in dict.fromkeys(fleet.profiles)],
        "cache": "cold: every run starts with empty replicas and gateways",
    }
    bounds = _bounds(campaign, loads, range(first_seed, first_seed + seeds), entries) if oracle else []
    results.write(out, entries, origin, comparisons, {"bounds": bounds} if oracle else None)
    _report(console, made.window_s, made.drain_s, entries, comparisons, bounds, replicas)
    if trace is not None and made.source.name == "journal":
        counterfactual.show(console, counterfactual.recorded(trace), entries, replicas)
    console.print(f"written to {out}", highlight=False)


def parse_loads(text: str) -> list[float]:
    """Raises UsageError naming what is no load."""
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--load {text!r}: numbers with commas between them, like 0.5,1,1.5, would be right") from None
    if any(not 0.0 < x < 1e6 for x in loads) or len(set(loads)) != len(loads):
        raise UsageError(f"--load {text!r}: different numbers above 0 would be right")
    return loads


def _configured(path: Path | None) -> tuple[Settings, dict[str, dict[str, Any]], Any]:
    """Settings of the core, settings by policy, and classes of a gateway configuration; defaults without one."""
    if path is None:
        return Settings(), {}, None
    held = gateway_config.load(path)
    arm = held.arm()
    return arm.settings, {arm.policy: dict(held.policy.settings)}, held.service_classes()


def _arms(names: Sequence[str], settings: Settings, without_bound: bool) -> dict[str, Arm]:
    arms: dict[str, Arm] = {}
    for name in names:
        arm = parse(name, settings)
        if arm.policy not in POLICIES:
            raise UsageError(f"--policy {name!r}: {arm.policy!r} is none of {', '.join(POLICIES)}")
        if arm.text in arms:
            raise UsageError(
                f"--policy {name!r} is given twice; the simulator is deterministic, so it would not differ"
            )
        arms[arm.text] = arm
    if without_bound:
        arms |= {name + UNBOUNDED: unbounded(arm) for name, arm in arms.items() if arm.settings.admission}
    return arms


def _oracle_arm(settings: Settings) -> Arm:
    return replace(parse("forebay", settings), text=ORACLE)


def _run(console: Console, campaign: Campaign, tasks: Sequence[Task], jobs: int, out: Path) -> list[dict[str, Any]]:
    """All runs with a bar; entries in the order asked for, requests.jsonl and schedules written on the way."""
    columns = (
        TextColumn("[bold]{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("runs"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn("{task.fields[last]}"),
    )  # fmt: skip
    work = {task: task.load * (10.0 if task.arm == ORACLE else 1.0) for task in tasks}
    done: dict[Task, dict[str, Any]] = {}
    parts: dict[Task, Path] = {}
    with Progress(*columns, console=console, transient=True) as bar:
        line = bar.add_task("simulate", total=len(tasks), last="")
        for task, entry, rows in run_all(campaign, tasks, jobs):
            done[task] = entry
            parts[task] = out / f".requests-{len(parts)}.part"
            parts[task].write_bytes(rows)
            share = sum(work[t] for t in done) / sum(work.values())
            bar.update(
                line, completed=share * len(tasks), last=f"{task.arm} at {task.load:g}: {entry['attainment']:.1%}"
            )
    with (out / "requests.jsonl").open("wb") as whole:
        for task in tasks:
            whole.write(parts[task].read_bytes())
            parts[task].unlink()
    folder = out / "schedules"
    folder.mkdir(exist_ok=True)
    for load, seed in dict.fromkeys((t.load, t.seed) for t in tasks):
        campaign.offer.schedule(seed, load).save(folder / f"load-{load:g}-seed-{seed}.jsonl.gz")
    return [done[task] for task in tasks]


def _bounds(
    campaign: Campaign, loads: Sequence[float], seeds: Sequence[int], entries: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    out = []
    for load in loads:
        for seed in seeds:
            schedule = campaign.offer.schedule(seed, load)
            found = upper_bound(schedule, campaign.fleet.scenario(schedule))
            best = max(e["good"] for e in entries if e["load"] == load and e["seed"] == seed)
            out.append(
                {
                    "load": load, "seed": seed, "good": found.good, "moore_hodgson": found.moore_hodgson,
                    "intervals": found.intervals, "best_achieved": best, "looseness": found.looseness(best),
                }
            )  # fmt: skip
    return out


def _report(
    console: Console,
    window_s: float,
    drain_s: float,
    entries: Sequence[dict[str, Any]],
    comparisons: Sequence[dict[str, Any]],
    bounds: Sequence[dict[str, Any]],
    replicas: int,
) -> None:
    for load in dict.fromkeys(e["load"] for e in entries):
        runs = [e for e in entries if e["load"] == load]
        rate = sum(e["offered_rps"] for e in runs) / len(runs)
        here = [c for c in comparisons if c["load"] == load]
        title = f"{rate:.2f} requests/s on {replicas} replicas, W {window_s:g} s, D {drain_s:g} s"
        tables.print_load(console, load, runs, here, title)
        for bound in (b for b in bounds if b["load"] == load):
            loose = "" if bound["looseness"] is None else f", {bound['looseness']:.2f} times the best run"
            console.print(f"seed {bound['seed']}: no policy can have more than {bound['good']:.0f} good{loose}")
        for comparison in here:
            console.print(comparison["statement"], highlight=False)
    if not all(e["disjoint"] for e in entries):
        console.print("some seeds share parts of the trace: their blocks are not independent, intervals are too narrow")
    console.print("goodput is latency-qualified: no answer was checked", style="dim")


def _fields(value: Any) -> dict[str, Any]:
    return asdict(value)
