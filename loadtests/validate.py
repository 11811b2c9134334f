"""`forebay validate URL URL`: the same small schedules on real replicas and on the engine model, and how far they
differ.

Each row of a schedule has its time, replica, prompt and forced length; the real replicas and the model get exactly
these, so only the engine differs. Reported per schedule: error of the median and 90th percentile of TTFT and TPOT,
cached tokens and preemptions. A profile fitted by `forebay calibrate` on the same machine is needed; times on a
shared machine move by tens of percent, which the same schedule run twice shows (`--again`).
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from gateway.vllm_metrics import read
from loadtests import profiles, results, terminal, tokens
from loadtests.calibrate import facts
from loadtests.client import BadUrlError, Client, Target
from loadtests.engine import Engine, EngineConfig, Job, Step
from loadtests.observe import FIRST_ID, LAST_ID, Observed, ReplicaError, ask, prompt


@dataclass(slots=True, frozen=True)
class Row:
    at_s: float
    replica: int
    ids: list[int]
    output_tokens: int


@dataclass(slots=True, frozen=True)
class Outcome:
    """Of one schedule: a row's observation each, and preemptions over all replicas."""

    rows: list[Observed]
    preemptions: int


def schedules(seed: int, replicas: int, capacity_tokens: int) -> dict[str, list[Row]]:
    """Poisson arrivals, shared prefixes, long prompts among decodes, and more than the cache holds."""
    rng = random.Random(seed)
    poisson, at = [], 0.0
    for i in range(24):
        at += rng.expovariate(1.6)
        poisson.append(Row(at, i % replicas, prompt(rng, rng.randrange(100, 1500)), rng.randrange(16, 64)))
    heads = [prompt(rng, 1024) for _ in range(3)]
    shared = [
        Row(0.7 * i, i % replicas, heads[i % 3] + prompt(rng, 96), 24)
        for i in range(18)
    ]  # fmt: skip
    mixed = [Row(0.05 * i, i % replicas, prompt(rng, 64), 120) for i in range(4 * replicas)]
    mixed += [Row(1.0 + 2.0 * i, i % replicas, prompt(rng, 4000), 8) for i in range(2 * replicas)]
    each = capacity_tokens * 3 // 2 // 620  # half as much again as fits
    tight = [Row(0.02 * i, i % replicas, prompt(rng, 256), 364) for i in range(each * replicas)]
    named = {"poisson": poisson, "shared": shared, "mixed": mixed, "tight": tight}
    return {name: sorted(rows, key=lambda row: row.at_s) for name, rows in named.items()}


async def real(urls: Sequence[str], model: str, rows: Sequence[Row]) -> Outcome:
    """The schedule on replicas whose prefix caches hold none of it."""
    clients = [Client(Target.parse(url), time.perf_counter) for url in urls]
    before = await _preemptions(urls)
    start = time.perf_counter()

    async def one(row: Row) -> Observed:
        await asyncio.sleep(max(0.0, row.at_s - (time.perf_counter() - start)))
        return await ask(clients[row.replica], model, row.ids, row.output_tokens)

    try:
        seen = await asyncio.gather(*(one(row) for row in rows))
    finally:
        for client in clients:
            client.close()
    await asyncio.sleep(0.2)  # the gauges of the last step
    return Outcome(list(seen), await _preemptions(urls) - before)


async def _preemptions(urls: Sequence[str]) -> int:
    async with httpx.AsyncClient(timeout=10, trust_env=False) as http:
        pages = await asyncio.gather(*(http.get(url + "/metrics") for url in urls))
    return sum(int(read(page.text, "replica", 0.0).preemptions or 0) for page in pages)


def modelled(config: EngineConfig, replicas: int, rows: Sequence[Row]) -> Outcome:
    """The schedule on engine models, in virtual time."""
    engines = [Engine(config) for _ in range(replicas)]
    frontend_s = config.profile.frontend_s
    block = engines[0].block
    events: list[tuple[float, int, Engine, Job | Step]] = []
    jobs = []
    for i, row in enumerate(rows):
        ids = tokens.chain(tokens.from_ids(row.ids), block)
        jobs.append(job := Job(str(i), len(row.ids), row.output_tokens, ids))
        heapq.heappush(events, (row.at_s + frontend_s, i, engines[row.replica], job))
    serial = len(rows)
    while events:
        now, _, engine, what = heapq.heappop(events)
        if isinstance(what, Job):
            engine.add(what, now)
            step = engine.step(now) if engine.current is None else None
        else:
            step = engine.step(now)
        if step is not None:
            serial += 1
            heapq.heappush(events, (step.end, serial, engine, step))
    seen = []
    for job, row in zip(jobs, rows, strict=True):
        first = (job.first_token_at or 0.0) - row.at_s
        last = (job.finished_at or 0.0) - row.at_s
        seen.append(Observed(job.prompt_tokens, job.output_tokens, first, last, job.cached_tokens))
    return Outcome(seen, sum(engine.counters.preemptions for engine in engines))


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def compared(theirs: Outcome, ours: Outcome) -> dict[str, tuple[float, float]]:
    """Figure -> (real, modelled). Seconds, tokens, counts."""
    found: dict[str, tuple[float, float]] = {}
    for name, q in (("p50", 0.5), ("p90", 0.9)):
        found[f"ttft_{name}_s"] = (
            quantile([o.ttft_s for o in theirs.rows], q), quantile([o.ttft_s for o in ours.rows], q),
        )  # fmt: skip
        found[f"tpot_{name}_s"] = (
            quantile([o.tpot_s or 0.0 for o in theirs.rows], q), quantile([o.tpot_s or 0.0 for o in ours.rows], q),
        )  # fmt: skip
    found["cached_tokens"] = (sum(o.cached_tokens for o in theirs.rows), sum(o.cached_tokens for o in ours.rows))
    same = sum(a.cached_tokens == b.cached_tokens for a, b in zip(theirs.rows, ours.rows, strict=True))
    found["rows_with_equal_cached_tokens"] = (len(theirs.rows), same)
    found["preemptions"] = (theirs.preemptions, ours.preemptions)
    return found


def validate(
    urls: Annotated[list[str], typer.Argument(help="Base URLs of idle vLLM replicas, all alike.")],
    profile: Annotated[str, typer.Option(help="JSON file of forebay calibrate, of one of these replicas.")],
    seed: Annotated[int, typer.Option(help="Seed of the schedules: a new one, or the caches answer.")] = 1,
    again: Annotated[bool, typer.Option(help="Run each schedule twice on the replicas: their own spread.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Run only this schedule; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Compares real replicas with the engine model on small schedules.

    Example: forebay validate http://127.0.0.1:8101 http://127.0.0.1:8102 --profile tiny.json
    """
    console = terminal.console()
    report: dict[str, dict[str, tuple[float, float]]] = {}
    try:
        if out is not None:
            results.ready_file(out)
        fitted = profiles.load(profile)
        known = asyncio.run(facts(urls[0]))
        capacity = (known.num_blocks - 1) * known.block_size
        config = EngineConfig(
            fitted,
            num_blocks=known.num_blocks,
            block_size=known.block_size,
            max_model_len=min(known.max_model_len, capacity),
        )
        mine = schedules(seed, len(urls), capacity)
        wanted = only or list(mine)
        for name in wanted:
            if name not in mine:
                raise ValueError(f"--only {name!r} must be one of {', '.join(mine)}")
        for name in wanted:
            with console.status(f"{name}: {len(mine[name])} requests on {len(urls)} replicas"):
                theirs = asyncio.run(real(urls, known.model, mine[name]))
            report[name] = compared(theirs, modelled(config, len(urls), mine[name]))
            _show(console, f"{name}: model against real", report[name])
            if again:  # the same times and lengths with fresh tokens
                with console.status(f"{name}: again"):
                    second = asyncio.run(real(urls, known.model, _fresh(mine[name], name)))
                report[f"{name}, real twice"] = compared(theirs, second)
                _show(console, f"{name}: real against real", report[f"{name}, real twice"])
            if out is not None:
                out.write_text(json.dumps(report, indent=2) + "\n")
    except (ReplicaError, BadUrlError, ValueError, OSError, httpx.HTTPError) as problem:
        typer.echo(f"forebay validate: {problem}", err=True)
        raise typer.Exit(2) from None


def _show(console: Console, title: str, figures: dict[str, tuple[float, float]]) -> None:
    table = Table("figure", "first", "second", "error", title=title)
    for figure, (first, second) in figures.items():
        error = f"{(second / first - 1) * 100:+.0f} %" if first else f"{second:+.0f}"
        table.add_row(figure, f"{first:.4g}", f"{second:.4g}", error)
    console.print(table)


def _fresh(rows: Sequence[Row], name: str) -> list[Row]:
    """`rows` with other tokens: shared heads stay shared, lengths and times stay."""
    words = list(range(FIRST_ID, LAST_ID))
    swap = dict(zip(words, random.Random(name).sample(words, len(words)), strict=True))
    return [Row(row.at_s, row.replica, [swap[i] for i in row.ids], row.output_tokens) for row in rows]
