"""`forebay demo`: what Forebay is, in a minute and without a GPU.

Four simulated replicas (engine model of an A100 with an 8B model), the gateway, and a multi-turn chat load near the
knee of round robin. Both policies get the same schedule from the same start state: caches are reset and the gateway's
index cleared before each. The table is measured at the client. One block is a demonstration: `forebay compare`
and `forebay simulate` make claims. Trade-off: replicas run twice as fast as real ones, so that a minute shows two.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich.console import Console

from loadtests import profiles, screen, simulated, terminal
from loadtests.conversation import Segment, Talk
from loadtests.drive import Behaviour
from loadtests.engine import EngineConfig
from loadtests.live_replica import ReplicaSettings
from loadtests.offer import Offer, with_objective
from loadtests.playground import Playground, PlaygroundError
from loadtests.replay import invalidate, measure, say_offer
from loadtests.requests import Shape
from loadtests.schedule import Row, Schedule
from loadtests.seeds import Stream, Zipf, mix, name_id
from loadtests.senders import LiveRun, SenderError
from loadtests.source import Generator
from loadtests.start_state import StartState, StartStateError
from loadtests.workloads import CLASSES

TIME_SCALE = 2.0
OBJECTIVE = "interactive:ttft=1.5s,tpot=60ms"
ARMS = ("round_robin", "forebay")
MODEL = "sim-8b"
SESSIONS_PER_S = 5.0


@dataclass(slots=True, frozen=True)
class Length:
    """Seconds of the replicas' time."""

    window_s: float
    drain_s: float


QUICK, FULL = Length(20.0, 14.0), Length(120.0, 30.0)


def conversations(seed: int, span_s: float) -> Sequence[Row]:
    """Short chats behind 8 shared system prompts: 5 sessions/s, 2 to 6 turns, short answers, think p50 2 s."""
    rows: list[Row] = []
    products = Zipf(8, 0.8)
    for n, at in enumerate(Stream(seed, "demo", "starts").poisson_times(SESSIONS_PER_S, span_s)):
        stream = Stream(seed, "demo", "session", str(n))
        product = products.draw(stream)
        system = 2_000 + Stream(0, "demo", "system", str(product)).below(2_000)
        talk = Talk([Segment(mix(name_id("demo"), product), system)], mix(seed, name_id("demo"), n))
        rows += talk.turns(
            f"demo-{n}", at, 2 + min(4, int(stream.exponential(2.0))),
            said=lambda s, turn: max(10, min(12_000, int(s.lognormal(300, 1_500) * (1 if turn else 3)))),
            answer=lambda s: max(8, min(600, int(s.lognormal(80, 160)))),
            think=lambda s: min(8.0, s.lognormal(2.0, 6.0)),
            stream=stream,
        )  # fmt: skip
    return rows


def schedule_of(length: Length, seed: int = 0, load: float = 1.0) -> Schedule:
    source = Generator("demo chat", conversations, (("interactive", 16_000, 600),))
    return Offer(source, with_objective(CLASSES, OBJECTIVE), length.window_s, length.drain_s).schedule(seed, load)


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute in all.")] = False,
    leave: Annotated[bool, typer.Option("--exit", help="Stop afterwards instead of serving on.")] = False,
    seed: Annotated[int, typer.Option(help="Another seed is another piece of traffic.")] = 0,
    window: Annotated[float | None, typer.Option(help="Seconds of arrivals for each policy, replica time.")] = None,
) -> None:
    """Simulated replicas, the gateway and a chat load: forebay against round robin, then it keeps serving.

    Exit status 1 when this machine could not keep the schedule (INVALID).

    Example: forebay demo --quick --exit
    """
    console = terminal.console()
    length = QUICK if quick else FULL
    if window is not None:
        if window <= 0.0:
            typer.echo(f"forebay demo: --window {window:g}: more than 0 seconds would be right", err=True)
            raise typer.Exit(2)
        length = Length(window, min(length.drain_s, 3.0 * window))
    schedule = schedule_of(length, seed)
    console.print("4 simulated replicas (A100, 8B model) and the gateway, on free ports of 127.0.0.1", highlight=False)
    say_offer(console, schedule, TIME_SCALE)
    try:
        with Playground(replica_settings(), 4, gateway_tables(schedule)) as ground:
            runs = [one_arm(console, ground, schedule, arm) for arm in ARMS]
            show(console, runs)
            if not leave:
                serve_on(console, ground)
    except (PlaygroundError, SenderError, StartStateError) as error:
        typer.echo(f"forebay demo: {error}", err=True)
        raise typer.Exit(1) from None
    if any(run["verdict"] != "valid" for run in runs):
        raise typer.Exit(1)


def replica_settings() -> ReplicaSettings:
    return ReplicaSettings(
        EngineConfig(replace(profiles.PROFILES["a100-8b"])), MODEL, time_scale=TIME_SCALE, stream_interval=4
    )


def gateway_tables(schedule: Schedule) -> dict[str, Any]:
    """The gateway judges by the same objectives as the client, in its own, faster seconds."""
    wanted = schedule.classes["interactive"]
    bounds = {"ttft_s": wanted.ttft_s, "ttft_s_per_token": wanted.ttft_s_per_token, "tpot_s": wanted.tpot_s}
    scaled = {name: value / TIME_SCALE for name, value in bounds.items() if value is not None}
    return {"classes": {"interactive": scaled}, "policy": {"name": ARMS[0]}}


def one_arm(console: Console, ground: Playground, schedule: Schedule, arm: str) -> dict[str, Any]:
    """Same start state, same schedule; the entry of summary.json."""
    asyncio.run(start_state(ground, arm))
    before = asyncio.run(simulated.lag_counts(ground.replica_urls))
    shape = Shape(MODEL, run_id=arm, time_scale=TIME_SCALE)
    live = LiveRun(schedule, ground.url, shape, Behaviour(), time_scale=TIME_SCALE, instrument=True)
    run, _ = measure(console, live, arm, ground.replica_urls)
    late = simulated.reasons(before, asyncio.run(simulated.lag_counts(ground.replica_urls)))
    if late:
        invalidate(run, late)
    return run


async def start_state(ground: Playground, arm: str) -> None:
    """Switches the policy, forgets the index, empties the caches, and probes them. Raises StartStateError."""
    state = StartState(MODEL, ground.replica_urls, ground.url)
    await state.look()
    await state.prepare(arm, arm, ground.url)


def show(console: Console, runs: Sequence[dict[str, Any]]) -> None:
    console.print(screen.run_table(runs, "measured at the client, from the scheduled time"))
    screen.print_reasons(console, runs)
    base, ours = runs
    if base["good"] and ours["good"] is not None:
        change = ours["good"] / base["good"] - 1.0
        console.print(
            f"{ours['policy']} answered {ours['good']} of {ours['offered']} requests within their objectives, "
            f"{base['policy']} {base['good']} ({change:+.0%}).\n"
            "One block shows, it does not prove: for a claim see forebay compare and forebay simulate.",
            highlight=False,
        )


def serve_on(console: Console, ground: Playground) -> None:
    """Until Ctrl-C."""
    body = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"hello"}}],"max_tokens":32,"stream":true}}'
    console.print(f"\nThe gateway serves on at {ground.url} (policy {ARMS[-1]}). Try it:\n", highlight=False)
    console.print(
        f"  curl -N {ground.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n",
        highlight=False, soft_wrap=True, markup=False,
    )  # fmt: skip
    try:
        console.print("Ctrl-C stops everything.")
        threading.Event().wait()
    except KeyboardInterrupt:
        console.print("stopped")
