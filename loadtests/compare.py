"""`forebay compare`: arms against each other, live, on the same schedules from the same start state.

A block is one seed: every arm runs it once, in the order of a balanced Latin square, after caches and index were
emptied and a probe showed it. The first arm is the reference and, unless told otherwise, runs twice in every block:
what it differs from itself is the noise floor. What may be claimed from the blocks is said by `pairing.py`.
Arms are policies of one gateway, switched by its admin API, or any servers by URL. Trade-off: an hour for five
blocks of four minutes and three arms; virtual time (`forebay simulate`) answers first.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from loadtests import (
    engine_watch,
    gateway_classes,
    pairing,
    provenance,
    replay,
    results,
    retry,
    screen,
    senders,
    simulated,
    terminal,
)
from loadtests.client import Target
from loadtests.drive import Behaviour
from loadtests.offer import CONFIG_HELP, OBJECTIVE_HELP, Offer, classes_of, offer
from loadtests.record import Record
from loadtests.requests import Shape
from loadtests.results import finite
from loadtests.schedule import Schedule, ScheduleError
from loadtests.senders import LiveRun, SenderError
from loadtests.start_state import StartState, StartStateError


@dataclass(slots=True, frozen=True)
class LiveArm:
    """A name in tables, where to send, and the policy to switch to (None: the URL is the arm)."""

    name: str
    url: str
    policy: str | None = None


@dataclass(slots=True, frozen=True)
class Plan:
    """What all runs of a comparison or search have in common."""

    offer: Offer
    shape: Shape
    behaviour: Behaviour
    replicas: tuple[str, ...]
    api_key: str | None
    workers: int | None
    time_scale: float


def compare(
    window: Annotated[float, typer.Option(help="Arrival window W in seconds.")],
    out: Annotated[Path, typer.Option(help="Folder for the results; forebay report draws them.")],
    arm: Annotated[list[str], typer.Option(help="POLICY with --gateway, else NAME=URL; the first is the reference.")],
    gateway: Annotated[str | None, typer.Option(help="Forebay gateway whose policy is switched for each arm.")] = None,
    workload: Annotated[str | None, typer.Option(help="A built-in workload.")] = None,
    trace: Annotated[Path | None, typer.Option(help="A public trace or a gateway journal.")] = None,
    trace_format: Annotated[str | None, typer.Option("--format", help="Format of the trace, if not seen.")] = None,
    config: Annotated[Path | None, typer.Option(help=CONFIG_HELP)] = None,
    drain: Annotated[float | None, typer.Option(help="Seconds D after W in which answers still count.")] = None,
    load: Annotated[float, typer.Option(help="Multiple of the source's own rate.", min=0.001)] = 1.0,
    seeds: Annotated[int, typer.Option(help="Blocks; 5 or more for a claim.", min=1)] = 5,
    first_seed: Annotated[int, typer.Option(help="The seeds are this one and the following.", min=0)] = 0,
    objective: Annotated[list[str] | None, typer.Option(help=OBJECTIVE_HELP)] = None,
    replica: Annotated[list[str] | None, typer.Option(help="Replica behind the arms: reset and probed.")] = None,
    noise_floor: Annotated[bool, typer.Option(help="Run the first arm twice in each block (A/A).")] = True,
    concurrency: Annotated[int | None, typer.Option(help="So many in flight instead: response-paced.", min=1)] = None,
    model: Annotated[str | None, typer.Option(help="Model name; default: the first listed.")] = None,
    endpoint: Annotated[str, typer.Option(help="chat, completions or ids.")] = "chat",
    retries: Annotated[str, typer.Option(help="none, or official.")] = "none",
    workers: Annotated[int | None, typer.Option(help="Sending processes.", min=1)] = None,
    time_scale: Annotated[
        float, typer.Option(help="How much faster than real the simulated replicas live.", min=0.001)
    ] = 1.0,
    thin: Annotated[float, typer.Option(help="Share of a trace's prefix groups to keep.", min=0.0001, max=1.0)] = 1.0,
    longest_prompt: Annotated[int | None, typer.Option(help="Leave out longer prompts of a trace.", min=1)] = None,
    facts: Annotated[Path | None, typer.Option(help="JSON file of facts only you know.")] = None,
) -> None:
    """Compare policies or servers live: paired blocks, balanced order, same start state, an interval.

    Example: forebay compare --gateway http://127.0.0.1:8080 --arm round_robin --arm forebay
    --replica http://127.0.0.1:8101 --workload chat --window 120 --out runs/compare

    An admin token is read from FOREBAY_ADMIN_TOKEN, a client key from FOREBAY_API_KEY.
    """
    console = terminal.console()
    key = os.environ.get("FOREBAY_API_KEY")
    try:
        arms = [parse_arm(text, gateway) for text in arm]
        if len({one.name for one in arms}) < len(arms) or len(arms) < 2:
            raise replay.SetupError(f"--arm: {', '.join(arm)}; at least two arms of different names would be right")
        if retries not in replay.RETRIES:
            raise replay.SetupError(f"--retries {retries!r}: none or official would be right")
        made = offer(
            workload, trace, window_s=window, drain_s=drain, objectives=objective or (), form=trace_format,
            thin_to=thin, longest_prompt=longest_prompt, classes=classes_of(config),
        )  # fmt: skip
        name = model or asyncio.run(replay.first_model(arms[0].url, key, asked_by(arms[0])))
        shape = Shape(name, endpoint, time_scale=time_scale)
        known = provenance.facts_file(facts)
        results.ready(out)
    except replay.BAD_USAGE as error:
        typer.echo(f"forebay compare: {error}", err=True)
        raise typer.Exit(2) from None
    behaviour = Behaviour(retries=replay.RETRIES[retries], concurrency=concurrency)
    plan = Plan(made, shape, behaviour, tuple(replica or ()), key, workers, time_scale)
    origin = provenance.here() | {"facts": known, "workload": made.source.name}
    origin["replicas"] = {one: asyncio.run(provenance.replica(one, key)) for one in plan.replicas}
    state = StartState(name, plan.replicas, gateway, key, os.environ.get("FOREBAY_ADMIN_TOKEN"))
    wanted = list(range(first_seed, first_seed + seeds))
    runs: list[tuple[dict[str, Any], list[Record]]] = []
    try:
        if gateway is not None and time_scale == 1.0:
            origin["objectives_differ"] = gateway_classes.differences(
                made.schedule(wanted[0], load), asyncio.run(gateway_classes.of(gateway, state.admin_token))
            )
            for line in origin["objectives_differ"]:
                console.print(f"[yellow]note[/yellow] {line}", highlight=False)
        try:
            run_blocks(console, plan, state, arms, wanted, load, noise_floor, runs)
        except BaseException:  # Ctrl-C too: an hour of runs is not thrown away for the last of them
            keep(console, out, plan, runs, origin, load)
            raise
        finally:
            leave(console, state)
        comparisons = pairing.compare_all([run for run, _ in runs])
    except (SenderError, StartStateError, pairing.RefusedError, ScheduleError) as error:
        typer.echo(f"forebay compare: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ScheduleError) else 1) from None
    finish(console, out, plan, runs, comparisons, origin, wanted, load)
    if any(run["verdict"] != "valid" for run, _ in runs):
        raise typer.Exit(1)


def parse_arm(text: str, gateway: str | None) -> LiveArm:
    """`NAME=URL`, or a policy of the gateway."""
    name, equals, url = text.partition("=")
    if gateway is not None:
        if equals:
            raise replay.SetupError(f"--arm {text!r}: with --gateway an arm is a policy, like forebay")
        Target.parse(gateway)
        return LiveArm(text, gateway, text)
    if not equals:
        raise replay.SetupError(f"--arm {text!r}: NAME=URL would be right, or --gateway URL to switch its policies")
    Target.parse(url)
    return LiveArm(name, url)


def asked_by(arm: LiveArm) -> str:
    """The option that gave an arm its URL, as it stands before that URL in a mistake."""
    return f"--arm {arm.name}:" if arm.policy is None else "--gateway"


def keep(
    console: Console,
    out: Path,
    plan: Plan,
    runs: list[tuple[dict[str, Any], list[Record]]],
    origin: dict[str, Any],
    load: float,
) -> None:
    """What ended before a comparison was cut short, without claims."""
    if runs:
        schedules = [plan.offer.schedule(seed, load) for seed in dict.fromkeys(run["seed"] for run, _ in runs)]
        replay.write(out, runs, origin | {"cut_short": True}, schedules)
        console.print(f"cut short: the {len(runs)} runs that ended are in {out}, without a comparison", highlight=False)


def leave(console: Console, state: StartState) -> None:
    """A gateway whose policies were switched goes on with the one it had, however the runs ended."""
    if policy := asyncio.run(state.leave()):
        console.print(f"{state.gateway} runs {policy} again", highlight=False)


def run_blocks(
    console: Console,
    plan: Plan,
    state: StartState,
    arms: list[LiveArm],
    seeds: list[int],
    load: float,
    noise_floor: bool,
    runs: list[tuple[dict[str, Any], list[Record]]],
) -> None:
    """Every arm once in every block, the first one twice with a noise floor; added to `runs` as they end."""
    asyncio.run(state.look([one.policy for one in arms if one.policy is not None]))
    twice = [replace(arms[0], name=arms[0].name + pairing.AGAIN)] if noise_floor else []
    by_name = {one.name: one for one in [*arms, *twice]}
    console.print(
        f"{len(seeds)} blocks of {len(by_name)} runs, start state by {'reset' if state.resets else 'salt'}",
        highlight=False,
    )
    for block, seed in enumerate(seeds):
        for place, name in enumerate(pairing.order(list(by_name), block)):
            title = f"block {block + 1}/{len(seeds)} {name}"
            run, records = run_once(console, plan, state, by_name[name], plan.offer.schedule(seed, load), title)
            run["order"] = {"block": block, "place": place}
            runs.append((run, records))


def run_once(
    console: Console, plan: Plan, state: StartState, arm: LiveArm, schedule: Schedule, title: str
) -> tuple[dict[str, Any], list[Record]]:
    """One run from the start state. Raises StartStateError, SenderError."""
    seed, load = schedule.recipe.seed, schedule.recipe.load
    label = f"{arm.name}-{load:g}-{seed}".replace(" ", "")
    proof = asyncio.run(state.prepare(label, arm.policy, arm.url))
    before = asyncio.run(simulated.lag_counts(plan.replicas))
    engine = asyncio.run(engine_watch.totals(plan.replicas))
    shape = replace(plan.shape, run_id=label, salt=state.salt_of(label))
    behaviour = replace(plan.behaviour, seed=seed)
    count = plan.workers or senders.workers_for(schedule, shape.stream, os.cpu_count() or 1, plan.time_scale)
    live = LiveRun(schedule, arm.url, shape, behaviour, plan.api_key, count, plan.time_scale)
    run, records = replay.measure(console, live, arm.name, plan.replicas, title)
    late = simulated.reasons(before, asyncio.run(simulated.lag_counts(plan.replicas)))
    if late:
        replay.invalidate(run, late)
    run["engine"] = engine_watch.gained(engine, asyncio.run(engine_watch.totals(plan.replicas)))
    run["reuse"] |= engine_watch.by_cache(run["engine"])
    asyncio.run(state.warm(label, arm.url))
    run["start_state"] = proof
    run["setup"] = {"behaviour": behaviour_of(behaviour), "model": shape.model, "endpoint": shape.endpoint}
    return run, records


def behaviour_of(behaviour: Behaviour) -> dict[str, Any]:
    """What about the clients must be equal in two runs that are compared."""
    return {
        "retries": "official" if behaviour.retries is retry.OFFICIAL else "none",
        "patience_s": behaviour.patience_s,
        "concurrency": behaviour.concurrency,
    }


def finish(
    console: Console,
    out: Path,
    plan: Plan,
    runs: list[tuple[dict[str, Any], list[Record]]],
    comparisons: list[dict[str, Any]],
    origin: dict[str, Any],
    seeds: list[int],
    load: float,
) -> None:
    """Files and tables."""
    for found in comparisons:
        found["discordant"] = pairing.discordant(
            [(run["seed"], records) for run, records in runs if run["policy"] == found["a"]],
            [(run["seed"], records) for run, records in runs if run["policy"] == found["b"]],
        )
    schedules = [plan.offer.schedule(seed, load) for seed in seeds]
    replay.write(out, runs, origin, schedules, [finite(found) for found in comparisons])
    first = [run for run, _ in runs if run["seed"] == seeds[0]]
    order = {name: i for i, name in enumerate(dict.fromkeys(run["policy"] for run in first))}
    first.sort(key=lambda run: order[run["policy"]])
    console.print(screen.run_table(first, f"first of {len(seeds)} blocks"))
    screen.print_errors(console, first)
    screen.print_reasons(console, [run for run, _ in runs])
    if not all(run["start_state"]["proven"] for run, _ in runs[1:]):
        console.print("start state not proven: the replicas report no cached_tokens", highlight=False)
    for found in comparisons:
        console.print(found["statement"], highlight=False)
    console.print(f"written to {out}; forebay report {out} draws it", highlight=False)
