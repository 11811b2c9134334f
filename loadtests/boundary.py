"""`forebay boundary`: the highest load at which a chosen share of requests still meets its objectives.

In virtual time by default, live with --gateway or NAME=URL arms. Each arm is searched `repeats` times, each time over
other seeds; arms are compared by the ratio of their boundaries, repeat by repeat, with a bootstrap interval. Every
probe starts from the same cold state, so the order of probes warms nothing. With --burst the runs have a burst in them
and the answer is how long each arm needs to recover at the load given by --from.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from loadtests import profiles, provenance, replay, results, screen, terminal
from loadtests.campaign import Fleet, simulate_arm
from loadtests.compare import LiveArm, Plan, asked_by, leave, parse_arm, run_once
from loadtests.drive import Behaviour
from loadtests.offer import CONFIG_HELP, OBJECTIVE_HELP, Offer, classes_of, offer
from loadtests.record import Record
from loadtests.recovery import Burst, Recovery, recovery, settled
from loadtests.requests import Shape
from loadtests.results import cohort_of, finite
from loadtests.schedule import Schedule, ScheduleError
from loadtests.search import Block, Boundary, Probe, Search
from loadtests.senders import SenderError
from loadtests.start_state import StartState, StartStateError
from policies import make
from policies.arms import parse
from policies.objectives import Partition
from policies.statistics import bootstrap_mean, paired

SCHEMA = "forebay.boundary/1"

Runner = Callable[[str, Schedule], list[Record]]


class InvalidRunError(RuntimeError):
    """A live probe whose generator fell behind: the search cannot go on from it."""


@dataclass(slots=True)
class Ask:
    """What is searched for, on what."""

    offer: Offer
    target: float
    start: float
    seeds: int
    repeats: int
    burst: Burst | None
    run: Runner
    console: Console

    def schedule(self, load: float, seed: int) -> Schedule:
        base = self.offer.schedule(seed, load)
        if self.burst is None:
            return base
        extra = self.offer.schedule(seed + 500_000, load * (self.burst.factor - 1.0))
        return self.burst.over(base, extra)

    def block(self, arm: str, load: float, seed: int) -> Block:
        schedule = self.schedule(load, seed)
        cohort = cohort_of(schedule, self.run(arm, schedule))
        good = sum(r.partition is Partition.GOOD for r in cohort)
        return Block(good, len(cohort), settled(cohort, schedule.window_s))

    def boundary(self, arm: str, repeat: int) -> Boundary:
        seeds = [repeat * self.seeds + i for i in range(self.seeds)]
        fresh = [seed + 100_000 for seed in seeds]

        def report(probe: Probe) -> None:
            if not probe.offered:
                self.console.print(f"  {arm} load {probe.load:.3f}: no request within the window", highlight=False)
                return
            self.console.print(
                f"  {arm} load {probe.load:.3f}: {screen.share(probe.attainment)} "
                f"[{screen.share(probe.low)}, {screen.share(probe.high)}] {probe.verdict}"
                f"{' (confirming)' if probe.confirming else ''}{'' if probe.settled else ', backlog grows'}",
                highlight=False,
            )

        search = Search(
            lambda load, seed: self.block(arm, load, seed), target=self.target, seeds=seeds, fresh=fresh, report=report
        )
        return search.boundary(self.start)

    def recoveries(self, arm: str) -> list[Recovery]:
        assert self.burst is not None
        end = self.burst.at_s + self.burst.lasts_s
        out = []
        for seed in range(self.seeds):
            schedule = self.schedule(self.start, seed)
            records = cohort_of(schedule, self.run(arm, schedule))
            out.append(recovery(records, self.burst.at_s, end, schedule.window_s, self.target))
        return out


def boundary(
    window: Annotated[float, typer.Option(help="Arrival window W in seconds of every probe.")],
    out: Annotated[Path, typer.Option(help="Folder for boundary.json.")],
    arm: Annotated[list[str], typer.Option(help="ARM = NAME[+admission][+pacing]; live: a policy, or NAME=URL.")],
    workload: Annotated[str | None, typer.Option(help="A built-in workload.")] = None,
    trace: Annotated[Path | None, typer.Option(help="A public trace or a gateway journal.")] = None,
    trace_format: Annotated[str | None, typer.Option("--format", help="Format of the trace, if not seen.")] = None,
    config: Annotated[Path | None, typer.Option(help=CONFIG_HELP)] = None,
    target: Annotated[float, typer.Option(help="Attainment to keep.", min=0.01, max=0.999)] = 0.95,
    start: Annotated[float, typer.Option("--from", help="Load of the first probe.")] = 1.0,
    seeds: Annotated[int, typer.Option(help="Blocks of a probe.", min=1)] = 2,
    repeats: Annotated[int, typer.Option(help="Searches per arm, each over its own seeds.", min=1)] = 3,
    burst: Annotated[str | None, typer.Option(help="Measure recovery instead: 3x@60+20.")] = None,
    drain: Annotated[float | None, typer.Option(help="Seconds D after W in which answers still count.")] = None,
    objective: Annotated[list[str] | None, typer.Option(help=OBJECTIVE_HELP)] = None,
    replicas: Annotated[int, typer.Option(help="Simulated replicas.", min=1)] = 8,
    profile: Annotated[str, typer.Option(help="Step times of simulated replicas.")] = "a100-8b",
    max_batched_tokens: Annotated[int | None, typer.Option(help="Token budget of a simulated step.", min=1)] = None,
    gateway: Annotated[str | None, typer.Option(help="Live: Forebay gateway whose policy is switched.")] = None,
    replica: Annotated[list[str] | None, typer.Option(help="Live: replica behind the arms.")] = None,
    model: Annotated[str | None, typer.Option(help="Live: model name.")] = None,
    time_scale: Annotated[
        float, typer.Option(help="Live: how much faster the simulated replicas live.", min=0.001)
    ] = 1.0,
) -> None:
    """Find the highest load that keeps an attainment, per arm, and the ratio between arms; or recovery after a burst.

    Example: forebay boundary --workload chat --arm round_robin --arm forebay --window 300 --out runs/boundary
    """
    console = terminal.console()
    state = None
    live = gateway is not None or any("=" in one for one in arm)
    try:
        made = offer(
            workload, trace, window_s=window, drain_s=drain, objectives=objective or (), form=trace_format,
            classes=classes_of(config),
        )  # fmt: skip
        shaken = Burst.parse(burst) if burst else None
        if shaken and shaken.at_s + shaken.lasts_s >= window:
            raise ScheduleError(f"--burst {burst!r}: it must end before the window of {window:g} s does")
        if start <= 0.0:
            raise ScheduleError(f"--from {start:g}: a load above 0 would be right")
        if live:
            arms = [parse_arm(one, gateway) for one in arm]
            state = state_of(arms, gateway, tuple(replica or ()), model)
            run = live_runner(console, made, arms, state, time_scale)
        else:
            run = virtual_runner(arm, replicas, profile, max_batched_tokens, console)
        results.ready(out)
    except (*replay.BAD_USAGE, ValueError, StartStateError) as error:
        typer.echo(f"forebay boundary: {error}", err=True)
        raise typer.Exit(2) from None
    names = [one.partition("=")[0] for one in arm]
    ask = Ask(made, target, start, seeds, repeats, shaken, run, console)
    try:
        try:
            found = recovered(ask, names) if shaken else searched(ask, names)
        finally:
            if state is not None:
                leave(console, state)
    except (SenderError, StartStateError, InvalidRunError) as error:
        typer.echo(f"forebay boundary: {error}", err=True)
        raise typer.Exit(1) from None
    whole = {"schema": SCHEMA, "target": target, **found, "provenance": provenance.here()}
    (out / "boundary.json").write_text(json.dumps(finite(whole), indent=1) + "\n")
    console.print(f"written to {out / 'boundary.json'}", highlight=False)


def searched(ask: Ask, arms: list[str]) -> dict[str, Any]:
    """Boundaries of every arm and their ratios to the first arm's."""
    found = {arm: [ask.boundary(arm, repeat) for repeat in range(ask.repeats)] for arm in arms}
    table = Table(title=f"highest load keeping {ask.target:.0%}", title_justify="left", show_edge=False)
    for name in ("arm", "boundary, mean of searches", "single searches", "confirmed", "ratio to the first"):
        table.add_column(name)
    ratios: dict[str, Any] = {}
    for arm, boundaries in found.items():
        known = [b.load for b in boundaries if b.load is not None]
        pairs = [
            (a.load, b.load)
            for a, b in zip(found[arms[0]], boundaries, strict=True)
            if a.load is not None and b.load is not None
        ]
        ratio = paired([a for a, _ in pairs], [b for _, b in pairs]).ratio if pairs else None
        ratios[arm] = None if ratio is None else list(ratio)
        mean = bootstrap_mean(known).estimate if known else None
        table.add_row(
            arm, screen.number(mean, 3), " ".join(screen.number(b.load, 3) for b in boundaries),
            f"{sum(b.confirmed is True for b in boundaries)} of {len(boundaries)}",
            screen.DASH if ratio is None else interval(ratio, len(pairs)),
        )  # fmt: skip
    ask.console.print(table)
    for arm in (arm for arm, boundaries in found.items() if all(b.load is None for b in boundaries)):
        ask.console.print(
            f"{arm}: no load was found that surely keeps {ask.target:.0%}: too few requests in each probe (take a "
            "longer --window, or more --seeds), or objectives that even an idle fleet misses",
            highlight=False,
        )
    return {"boundaries": {arm: [b.to_json() for b in found[arm]] for arm in arms}, "ratio_to_first": ratios}


def interval(ratio: tuple[float, float, float], n: int) -> str:
    return f"{ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]" if n > 1 else f"{ratio[0]:.2f} (one search)"


def recovered(ask: Ask, arms: list[str]) -> dict[str, Any]:
    """Recovery of every arm over the seeds; a run that never recovers is censored at its end."""
    assert ask.burst is not None
    table = Table(title=f"recovery after {ask.burst.factor:g}x for {ask.burst.lasts_s:g} s at load {ask.start:g}",
                  title_justify="left", show_edge=False)  # fmt: skip
    for name in (
        "arm",
        "recovered after (s)",
        "failed requests",
        "good requests missed",
        "attained in each 10 s after it",
    ):
        table.add_column(name)
    found: dict[str, Any] = {}
    for arm in arms:
        mine = ask.recoveries(arm)
        found[arm] = [one.to_json() for one in mine]
        table.add_row(
            arm,
            " ".join(f"over {one.censored_at_s:.0f}" if one.recovered_after_s is None else
                     f"{one.recovered_after_s:.0f}" for one in mine),
            " ".join(str(one.failed_requests) for one in mine),
            " ".join(f"{one.missed_good_requests:.0f}" for one in mine),
            " ".join(f"{sum(g) / sum(o):.1%}" if sum(o) else "-" for o, g in zip(
                zip(*(one.offered_after for one in mine), strict=True),
                zip(*(one.good_after for one in mine), strict=True), strict=True)),
        )  # fmt: skip
    ask.console.print(table)
    return {"load": ask.start, "recoveries": found}


def virtual_runner(arms: list[str], replicas: int, profile: str, budget: int | None, console: Console) -> Runner:
    """Raises ValueError for an unknown arm or profile."""
    parsed = {one: parse(one) for one in arms}
    for known in parsed.values():
        make(known.policy)
    fleet = Fleet((profiles.load(profile),) * replicas, budget)

    def run(arm: str, schedule: Schedule) -> list[Record]:
        with console.status(f"{arm} load {schedule.recipe.load:.3f}, seed {schedule.recipe.seed}"):
            return list(simulate_arm(schedule, fleet.scenario(schedule), parsed[arm], {}).records)

    return run


def state_of(arms: list[LiveArm], gateway: str | None, replicas: tuple[str, ...], model: str | None) -> StartState:
    """Raises SetupError, StartStateError."""
    key = os.environ.get("FOREBAY_API_KEY")
    name = model or asyncio.run(replay.first_model(arms[0].url, key, asked_by(arms[0])))
    state = StartState(name, replicas, gateway, key, os.environ.get("FOREBAY_ADMIN_TOKEN"))
    asyncio.run(state.look([one.policy for one in arms if one.policy is not None]))
    return state


def live_runner(
    console: Console,
    made: Offer,
    arms: list[LiveArm],
    state: StartState,
    time_scale: float,
) -> Runner:
    shape = Shape(state.model, time_scale=time_scale)
    plan = Plan(made, shape, Behaviour(), tuple(state.replicas), state.api_key, None, time_scale)
    by_name = {one.name: one for one in arms}

    def run(arm: str, schedule: Schedule) -> list[Record]:
        title = f"{arm} load {schedule.recipe.load:.3f}"
        entry, records = run_once(console, plan, state, by_name[arm], schedule, title)
        if entry["verdict"] != "valid":
            raise InvalidRunError(f"{title}: INVALID, {'; '.join(entry['reasons'])}")
        return records

    return run
