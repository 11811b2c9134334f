"""`forebay diagnose`: where the time went, what held the run back, and the one setting to try next.

On a result folder it reads what replay, compare or simulate wrote; on a URL it watches live traffic of a gateway for a
while through `/admin/fleet` and the replicas' `/metrics`. Cost per 1,000 good requests comes from a price per GPU-hour.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import httpx
import orjson
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from loadtests import engine_watch, results, screen, terminal, watch
from loadtests.constraint import constraint
from loadtests.engine_watch import Totals, gained, mean_s
from loadtests.split import Split, mean, split

NAMES = {
    "client_lag": "client lag", "gateway_queue": "gateway queue", "engine_queue": "engine queue",
    "prefill": "prefill", "decode": "decode", "transport": "transport and host",
    "undivided": "replica, not divided",
}  # fmt: skip


class DiagnosisError(ValueError):
    """Nothing to look at; the text says what would be right."""


def diagnose(
    folder: Annotated[Path | None, typer.Argument(help="Result folder of replay, compare or simulate.")] = None,
    url: Annotated[str | None, typer.Option(help="Watch live traffic of this gateway instead.")] = None,
    seconds: Annotated[float, typer.Option("--for", help="Seconds to watch --url.", min=1.0)] = 15.0,
    gpu_hour_price: Annotated[float | None, typer.Option(help="Price of one GPU-hour.", min=0.0)] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of the fleet; default: one per replica seen.", min=1)] = None,
) -> None:
    """Split requests into lag, queues, prefill, decode and transport; name the constraint and what to try next.

    Example: forebay diagnose runs/chat --gpu-hour-price 2.50

    Example: forebay diagnose --url http://127.0.0.1:8080 --for 30
    """
    console = terminal.console()
    try:
        if (folder is None) == (url is None):
            raise DiagnosisError("give either a result folder or --url URL")
        if folder is not None:
            of_folder(console, folder, gpu_hour_price, gpus)
        else:
            assert url is not None
            asyncio.run(of_traffic(console, url, seconds))
    except (ValueError, httpx.HTTPError) as error:
        typer.echo(f"forebay diagnose: {error}", err=True)
        raise typer.Exit(2) from None


def of_folder(console: Console, folder: Path, price: float | None, gpus: int | None) -> None:
    """Every arm and load of a folder, its runs taken together. Raises ValueError."""
    summary = results.read(folder)
    with console.status(f"reading the requests of {folder}"):
        splits = read_splits(folder, summary["runs"])
    for (arm, load), runs in by_arm(summary["runs"]).items():
        whole = mean(splits.get((arm, load), []))
        engine = added([run.get("engine") or {} for run in runs])
        console.print(split_table(whole, f"{arm}, load {load:g}: mean of {len(splits.get((arm, load), []))} answers"))
        if caches := engine_watch.by_cache(engine):
            console.print(cache_line(caches), highlight=False)
        if told := watch.line([row for run in runs for row in run.get("watched") or ()]):
            console.print(told, highlight=False)
        found = constraint(worst(runs), whole, engine)
        console.print(f"constraint: [bold]{found.name}[/bold]. {found.evidence}", highlight=False)
        console.print(f"try next:   {found.try_next}", highlight=False)
        if price is not None:
            console.print(cost_line(runs, price, gpus), highlight=False)
        console.print()


def by_arm(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, float], list[Mapping[str, Any]]]:
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = defaultdict(list)
    for run in runs:
        groups[str(run["policy"]), float(run["load"])].append(run)
    return dict(groups)


def worst(runs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The run that tells most: an invalid one, else the one with the least attainment."""
    return min(runs, key=lambda run: (run["verdict"] == "valid", run["attainment"] or 0.0))


def read_splits(folder: Path, runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, float], list[Split]]:
    engines = {(r["policy"], float(r["load"]), r["seed"]): r.get("engine") or {} for r in runs}
    found: dict[tuple[str, float], list[Split]] = defaultdict(list)
    path = folder / "requests.jsonl"
    if not path.is_file():
        raise DiagnosisError(f"{path}: not there; it holds the times of each request")
    with path.open("rb") as lines:
        for line in lines:
            row = orjson.loads(line)
            if row.get("counted") and row.get("complete"):
                key = (row["policy"], float(row["load"]))
                one = split(row, engines.get((*key, row["seed"]), {}))
                if one is not None:
                    found[key].append(one)
    return dict(found)


def added(parts: Sequence[Totals]) -> Totals:
    out: Totals = {}
    for part in parts:
        for name, value in part.items():
            out[name] = out.get(name, 0.0) + value
    return out


def split_table(whole: Split, title: str) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, show_header=False, pad_edge=False)
    for _ in range(4):
        table.add_column(justify="left")
    shares = whole.shares()
    for name, value in asdict(whole).items():
        table.add_row(NAMES[name], screen.seconds(value), screen.share(shares[name]), "█" * round(40 * shares[name]))
    return table


def cache_line(caches: Mapping[str, float]) -> str:
    return "prompt tokens: " + ", ".join(
        f"{screen.share(part)} from {name.replace('_', ' ')}" for name, part in caches.items()
    )


def cost_line(runs: Sequence[Mapping[str, Any]], price: float, gpus: int | None) -> str:
    """Price x GPUs x (W + D) over the good requests of the valid runs."""
    valid = [run for run in runs if run["verdict"] == "valid"]
    good = sum(run["good"] for run in valid)
    seen = gpus or max((len(run["per_replica"]) for run in runs), default=0)
    if not good or not seen:
        return "cost: no good request in a valid run, or unknown GPUs (--gpus)"
    hours = sum(run["window_s"] + run["drain_s"] for run in valid) / 3600.0
    cost = price * seen * hours / good * 1000.0
    return f"cost: {cost:.3f} per 1,000 good requests ({seen} GPUs at {price:g} an hour, drain included)"


async def of_traffic(console: Console, url: str, seconds: float) -> None:
    """Watches a gateway's fleet. Raises DiagnosisError or httpx.HTTPError."""
    token = os.environ.get("FOREBAY_ADMIN_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = url.rstrip("/")
    async with httpx.AsyncClient(timeout=10.0, trust_env=False, headers=headers) as client:
        try:
            answer = await client.get(f"{url}/admin/fleet")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DiagnosisError(f"--url {url}: no gateway answers: {error}") from None
    if answer.status_code in (401, 403):
        raise DiagnosisError(f"--url {url}: needs the admin token; put it into FOREBAY_ADMIN_TOKEN")
    if answer.status_code != 200:
        raise DiagnosisError(f"--url {url}: answered {answer.status_code} at /admin/fleet; is that a Forebay gateway?")
    urls = [member["url"] for member in answer.json()]
    before = await engine_watch.totals(urls)
    started = time.monotonic()
    with watch.Watch(urls, url) as seen:
        for _ in track(range(round(seconds * 10)), "watching", console=console, transient=True):
            await asyncio.sleep(0.1)
    after = await engine_watch.totals(urls)
    engine, passed = gained(before, after), time.monotonic() - started
    held, dispatched = seen.totals.get("held_sum_s", 0.0), seen.totals.get("held_count", 0.0)
    whole = Split(
        gateway_queue=held / dispatched if dispatched > 0 else 0.0,
        engine_queue=mean_s(engine, "queue") or 0.0,
        prefill=mean_s(engine, "prefill") or 0.0,
        decode=mean_s(engine, "decode") or 0.0,
    )
    finished = engine.get("queue_count", 0.0)
    if not finished:
        raise DiagnosisError(f"no request finished at {len(urls)} replicas in {passed:.0f} s; watch longer with --for")
    console.print(split_table(whole, f"{finished:.0f} requests finished in {passed:.0f} s, as the replicas saw them"))
    if told := watch.line(seen.rows):
        console.print(told, highlight=False)
    caches = engine_watch.by_cache(engine)
    if caches:
        console.print(cache_line(caches), highlight=False)
    run = {
        "policy": "live", "verdict": "valid", "reasons": [], "offered": round(finished), "shed": 0, "attainment": None,
        "reuse": {"achieved": sum(caches.values()) if caches else None},
    }  # fmt: skip
    found = constraint(run, whole, engine)
    console.print(f"constraint: [bold]{found.name}[/bold]. {found.evidence}", highlight=False)
    console.print(f"try next:   {found.try_next}", highlight=False)
    console.print("client lag and objectives are not seen from here: use a replay for those")
