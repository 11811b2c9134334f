"""`forebay replay`: one live run of a workload or trace against any OpenAI-compatible URL.

The smallest whole measurement: schedule, senders, records, verdict. Comparisons (`forebay compare`) and searches
(`forebay boundary`) are made of the same parts. Writes summary.json, requests.jsonl and schedule.jsonl.gz to --out.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gateway.config import ConfigError
from loadtests import engine_watch, provenance, quality, results, retry, screen, senders, simulated, terminal
from loadtests.client import BadUrlError, Target
from loadtests.drive import Behaviour
from loadtests.live_result import summarise
from loadtests.offer import CONFIG_HELP, OBJECTIVE_HELP, classes_of, offer
from loadtests.record import Record
from loadtests.requests import Shape, ShapeError
from loadtests.schedule import Schedule, ScheduleError
from loadtests.senders import LiveRun, SenderError
from loadtests.watch import Watch

RETRIES = {"none": retry.NONE, "official": retry.OFFICIAL}


class SetupError(ValueError):
    """Something asked for on the command line cannot be; the text names it. Exit status 2."""


BAD_USAGE = (
    SetupError, ScheduleError, ShapeError, BadUrlError, ConfigError, provenance.FactsError, quality.CheckError,
    results.OutError,
)  # fmt: skip


def replay(
    url: Annotated[str, typer.Option(help="Gateway or server, like http://127.0.0.1:8000.")],
    window: Annotated[float, typer.Option(help="Arrival window W in seconds; requests scheduled in it are counted.")],
    out: Annotated[Path, typer.Option(help="Folder for summary.json, requests.jsonl and schedule.jsonl.gz.")],
    workload: Annotated[str | None, typer.Option(help="A built-in workload: chat, coding, rag, unique, ...")] = None,
    trace: Annotated[Path | None, typer.Option(help="A public trace or a gateway journal, plain or .gz.")] = None,
    trace_format: Annotated[str | None, typer.Option("--format", help="Format of the trace, if not seen.")] = None,
    config: Annotated[Path | None, typer.Option(help=CONFIG_HELP)] = None,
    drain: Annotated[float | None, typer.Option(help="Seconds D after W in which answers still count.")] = None,
    load: Annotated[float, typer.Option(help="Multiple of the source's own rate.", min=0.001)] = 1.0,
    seed: Annotated[int, typer.Option(help="Chooses the piece of the source and all chance.")] = 0,
    objective: Annotated[list[str] | None, typer.Option(help=OBJECTIVE_HELP)] = None,
    concurrency: Annotated[int | None, typer.Option(help="So many in flight instead: response-paced.", min=1)] = None,
    model: Annotated[str | None, typer.Option(help="Model name; default: the first the server lists.")] = None,
    endpoint: Annotated[str, typer.Option(help="chat, completions or ids (token ids).")] = "chat",
    stream: Annotated[bool, typer.Option(help="Ask for streamed answers.")] = True,
    natural: Annotated[bool, typer.Option(help="Let answers end where the model ends them.")] = False,
    salt: Annotated[str | None, typer.Option(help="cache_salt of every request: shares nothing with others.")] = None,
    retries: Annotated[str, typer.Option(help="none, or official: as the OpenAI and Anthropic clients.")] = "none",
    patience: Annotated[
        float | None, typer.Option(help="Median seconds a client waits for its first token.", min=0.0)
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Sending processes; default: as many as needed.", min=1)] = None,
    time_scale: Annotated[
        float, typer.Option(help="How much faster than real the simulated replicas live.", min=0.001)
    ] = 1.0,
    thin: Annotated[float, typer.Option(help="Share of a trace's prefix groups to keep.", min=0.0001, max=1.0)] = 1.0,
    longest_prompt: Annotated[int | None, typer.Option(help="Leave out longer prompts of a trace.", min=1)] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Vocabulary size, for --endpoint ids.", min=1001)] = None,
    name: Annotated[str, typer.Option(help="Name of this run in tables.")] = "replay",
    replica: Annotated[list[str] | None, typer.Option(help="Replica behind --url, to read its facts.")] = None,
    facts: Annotated[Path | None, typer.Option(help="JSON file of facts only you know: GPU, driver, revision.")] = None,
    check: Annotated[str | None, typer.Option(help="FILE.py:function, your own check of answers.")] = None,
    check_share: Annotated[float, typer.Option(help="Share of answers that --check sees.", min=0.0, max=1.0)] = 1.0,
) -> None:
    """Send a workload or trace to a server at its own times and judge every answer.

    Latency counts from the scheduled time. Exit status 1 when the generator could not keep the schedule (INVALID).
    The key of a gateway with tenants is read from FOREBAY_API_KEY.

    Example: forebay replay --url http://127.0.0.1:8000 --workload chat --window 60 --out runs/chat
    """
    console = terminal.console()
    try:
        if retries not in RETRIES:
            raise SetupError(f"--retries {retries!r}: none or official would be right")
        answer_check = quality.load(check) if check else None
        Target.parse(url)
        made = offer(
            workload, trace, window_s=window, drain_s=drain, objectives=objective or (), form=trace_format,
            thin_to=thin, longest_prompt=longest_prompt, classes=classes_of(config),
        )  # fmt: skip
        schedule = made.schedule(seed, load)
        known = provenance.facts_file(facts)
        key = os.environ.get("FOREBAY_API_KEY")
        shape = Shape(
            model or asyncio.run(first_model(url, key)), endpoint, stream, natural, salt, f"{name}-{seed}", vocabulary,
            time_scale,
        )  # fmt: skip
        results.ready(out)
    except BAD_USAGE as error:
        typer.echo(f"forebay replay: {error}", err=True)
        raise typer.Exit(2) from None
    behaviour = Behaviour(
        patience_s=patience, retries=RETRIES[retries], concurrency=concurrency, seed=seed,
        keep_text_share=check_share if answer_check else 0.0,
    )  # fmt: skip
    count = workers or senders.workers_for(schedule, stream, os.cpu_count() or 1, time_scale)
    live = LiveRun(schedule, url, shape, behaviour, key, count, time_scale)
    origin = provenance.here() | {"server": asyncio.run(provenance.replica(url, key)), "facts": known}
    origin["replicas"] = {one: asyncio.run(provenance.replica(one, key)) for one in replica or ()}
    say_offer(console, schedule, time_scale)
    try:
        before, engine = (
            asyncio.run(simulated.lag_counts(replica or ())),
            asyncio.run(engine_watch.totals(replica or ())),
        )
        run, records = measure(console, live, name, replica or ())
        late = simulated.reasons(before, asyncio.run(simulated.lag_counts(replica or ())))
        if late:
            invalidate(run, late)
        run["engine"] = engine_watch.gained(engine, asyncio.run(engine_watch.totals(replica or ())))
        run["reuse"] |= engine_watch.by_cache(run["engine"])
    except SenderError as error:
        typer.echo(f"forebay replay: {error}", err=True)
        raise typer.Exit(1) from None
    if answer_check is not None:
        run["answer_check"] = quality.judge(answer_check, records)
    write(out, [(run, records)], origin, [schedule])
    console.print(screen.run_table([run], f"{schedule.recipe.workload}, W {schedule.window_s:g} s"))
    if answer_check is not None:
        told = run["answer_check"]
        console.print(f"answer check (not part of goodput): {told['passed']} of {told['checked']} passed")
    screen.print_errors(console, [run])
    screen.print_reasons(console, [run])
    console.print(f"written to {out}", highlight=False)
    if run["verdict"] != "valid":
        raise typer.Exit(1)


def measure(
    console: Console,
    live: LiveRun,
    policy: str,
    replicas: tuple[str, ...] | list[str] = (),
    title: str | None = None,
) -> tuple[dict[str, Any], list[Record]]:
    """Runs with a progress bar; gives the entry of summary.json and the records."""
    bar = screen.bar(console, title or policy, live.schedule, live.time_scale)
    with bar as show, Watch(replicas, live.url) as watch:
        got = senders.run(live, show)
    run = summarise(
        live.schedule, got.records, got.sustained, policy=policy, replicas=len(replicas) or None,
        response_paced=live.behaviour.concurrency is not None,
    )  # fmt: skip
    run["watched"] = watch.rows
    run["time_scale"] = live.time_scale
    run["connections"] = {"opened": got.connections_opened, "reused": got.connections_reused}
    return run, got.records


def invalidate(run: dict[str, Any], reasons: list[str]) -> None:
    """A run that must not be believed after all: no goodput, no attainment, and why."""
    run |= {"verdict": "invalid", "reasons": [*run["reasons"], *reasons]}
    for name in ("good", "goodput_rps", "good_per_window_rps", "attainment", "attainment_wilson95"):
        run[name] = None


def write(
    out: Path,
    runs: list[tuple[dict[str, Any], list[Record]]],
    origin: dict[str, Any],
    schedules: list[Schedule],
    comparisons: list[dict[str, Any]] | None = None,
) -> None:
    """summary.json, one line a request, and the schedules that were sent."""
    out.mkdir(parents=True, exist_ok=True)
    for schedule in schedules:
        label = f"{schedule.recipe.load:g}-{schedule.recipe.seed}" if len(schedules) > 1 else ""
        schedule.save(out / f"schedule{'-' if label else ''}{label}.jsonl.gz")
    with (out / "requests.jsonl").open("wb") as lines:
        for run, records in runs:
            for record in records:
                lines.write(results.line(record, run["policy"], run["load"], run["seed"]))
    results.write(out, [run for run, _ in runs], origin, comparisons or ())


def say_offer(console: Console, schedule: Schedule, time_scale: float) -> None:
    cohort = schedule.cohort
    console.print(
        f"{len(cohort)} requests in {schedule.window_s:g} s ({len(cohort) / schedule.window_s:.2f}/s), "
        f"drain {schedule.drain_s:g} s, schedule {schedule.sha256[:12]}",
        highlight=False,
    )
    if time_scale != 1.0:
        console.print(
            f"replicas live {time_scale:g} times faster: objectives and times below are in their time", highlight=False
        )


async def first_model(url: str, api_key: str | None, asked: str = "--url") -> str:
    """The first model that the server lists; SetupError, which names the option `asked`, when it lists none."""
    models = (await provenance.replica(url, api_key)).get("models") or []
    status = None if models else await provenance.models_status(url, api_key)
    if status in (401, 403):
        key = "the key in FOREBAY_API_KEY is not taken" if api_key else f"no key was sent: {screen.KEY_NEEDED}"
        raise SetupError(f"{asked} {url}: answered {status} at /v1/models; {key}")
    if not models:
        if status is None:
            raise SetupError(f"{asked} {url}: nobody answers there; check that it is up")
        raise SetupError(f"{asked} {url}: it lists no models at /v1/models; give --model NAME")
    return str(models[0]["id"])
