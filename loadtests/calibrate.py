"""`forebay calibrate URL`: measures one idle replica and fits the step-time profile that predicts it.

    TTFT(p)    = frontend + sum over chunks of step(chunk, its context)
    TPOT(n, c) = step(n decodes, n x c tokens of context)
    step       = max(floor, a + b x tokens) + c x context + d x sum(chunk x mean context) + e x sequences

Prompts of several lengths one at a time, prompts computed before (only their last block is new), and batches of
equal streams with short and long contexts. Every figure is the lower quartile of its repetitions; the fit minimises
log errors with a robust loss, since a shared machine makes outliers. What it cannot see: effects of mixing prefill
and decode beyond the formula.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gateway.vllm_metrics import read
from loadtests import results
from loadtests.client import BadUrlError, Client, Target
from loadtests.observe import ReplicaError, ask, prompt
from loadtests.profiles import Profile, dump

PREFILLS = (32, 128, 256, 512, 1024, 1536, 2040, 3000, 4096, 6000, 7500)
WARM = (1024, 4096)
DECODES = ((1, 32), (2, 32), (4, 32), (8, 32), (16, 32), (1, 4096), (4, 1500), (8, 750))
DECODE_TOKENS = 48


@dataclass(slots=True, frozen=True)
class Facts:
    """What the replica says about itself."""

    model: str
    max_model_len: int
    num_blocks: int
    block_size: int


@dataclass(slots=True, frozen=True)
class Measured:
    """One figure: `chunks` of (tokens, context before) for a TTFT, or `sequences` decodes of `context` each."""

    label: str
    seconds: float
    chunks: tuple[tuple[int, int], ...] = ()
    sequences: int = 0
    context: float = 0.0


def predicted_s(m: Measured, p: Profile) -> float:
    if m.sequences:
        return p.step_s(m.sequences, m.sequences, m.sequences * m.context, 0.0)
    steps = (p.step_s(tokens, 1, 0.0, tokens * (before + tokens / 2)) for tokens, before in m.chunks)
    return p.frontend_s + sum(steps)


def chunks_of(tokens: int, cached: int, budget: int) -> tuple[tuple[int, int], ...]:
    """How a prompt is computed alone: full budgets, then the rest."""
    return tuple((min(budget, tokens - at), at) for at in range(cached, tokens, budget))


def fit(figures: Sequence[Measured], start: Profile) -> Profile:
    """Least squares on log errors over floor, a, b, c, d, e and frontend; needs scipy."""
    import numpy as np
    from scipy.optimize import least_squares

    names = (
        "floor_s",
        "base_s",
        "per_token_s",
        "per_context_token_s",
        "per_chunk_context_s",
        "per_sequence_s",
        "frontend_s",
    )
    first = np.log([0.010, 0.010, 1e-4, 1e-8, 1e-9, 1e-4, 0.005])
    # far enough to be zero, near enough to stay steep
    low, high = np.log([1e-5, 1e-5, 1e-7, 1e-12, 1e-13, 1e-7, 1e-5]), np.log([1, 1, 1e-2, 1e-4, 1e-5, 1e-1, 1])

    def profile(x: Any) -> Profile:
        values: dict[str, Any] = {name: float(v) for name, v in zip(names, np.exp(x), strict=True)}
        return replace(start, **values)

    def errors(x: Any) -> Any:
        p = profile(x)
        return np.array([np.log(predicted_s(m, p) / m.seconds) for m in figures])

    best = least_squares(errors, first, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    return profile(best.x)


def undisturbed(seconds: Iterable[float]) -> float:
    """Lower quartile: other work on the machine only ever adds time."""
    ordered = sorted(seconds)
    return ordered[(len(ordered) - 1) // 4]


async def facts(url: str) -> Facts:
    """Raises ReplicaError when the URL is not a vLLM replica."""
    try:
        async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http:
            models = (await http.get("/v1/models")).json()["data"]
            seen = read((await http.get("/metrics")).text, "replica", 0.0)
    except (httpx.HTTPError, KeyError, ValueError, TypeError) as problem:
        raise ReplicaError(f"{url}: no vLLM replica answers there ({type(problem).__name__}: {problem})") from None
    if not models or seen.num_gpu_blocks is None or seen.block_size is None:
        raise ReplicaError(f"{url}: /metrics has no vllm:cache_config_info with num_gpu_blocks and block_size")
    base = next((m for m in models if not m.get("parent")), models[0])
    return Facts(base["id"], int(base.get("max_model_len") or 8192), seen.num_gpu_blocks, seen.block_size)


async def measure(
    url: str, known: Facts, budget: int, repeats: int, seed: int, advance: Callable[[], None] = lambda: None
) -> list[Measured]:
    client, rng = Client(Target.parse(url), time.perf_counter), random.Random(seed)
    prefills = [n for n in PREFILLS if n + 2 < known.max_model_len]
    figures = []
    try:
        await ask(client, known.model, prompt(rng, 64), 8)  # warms kernels and the connection
        for tokens in prefills:
            found, warm = [], []
            for _ in range(repeats):
                ids = prompt(rng, tokens)
                found.append(await ask(client, known.model, ids, 1))
                if tokens in WARM:
                    warm.append(await ask(client, known.model, ids, 1))
            seconds = undisturbed(o.ttft_s for o in found)
            figures.append(Measured(f"TTFT of {tokens} tokens", seconds, chunks_of(tokens, 0, budget)))
            if warm:
                cached = warm[0].cached_tokens
                seconds = undisturbed(o.ttft_s for o in warm)
                figures.append(
                    Measured(f"TTFT of {tokens}, {cached} cached", seconds, chunks_of(tokens, cached, budget))
                )
            advance()
        for sequences, tokens in DECODES:
            if tokens + DECODE_TOKENS >= known.max_model_len:
                continue
            paces = []
            for _ in range(repeats):
                paces += await _batch(client, known, rng, sequences, tokens)
            context = tokens + DECODE_TOKENS / 2
            label = f"TPOT of {sequences} at {context:.0f} context"
            figures.append(Measured(label, undisturbed(paces), sequences=sequences, context=context))
            advance()
    finally:
        client.close()
    return figures


async def _batch(client: Client, known: Facts, rng: random.Random, sequences: int, tokens: int) -> list[float]:
    """TPOT of equal streams. Their prompts are computed before, so that no prefill stands between the tokens."""
    prompts = [prompt(rng, tokens) for _ in range(sequences)]
    for ids in prompts if tokens > known.block_size else ():
        await ask(client, known.model, ids, 1)
    answers = await asyncio.gather(*(ask(client, known.model, ids, DECODE_TOKENS) for ids in prompts))
    return [o.tpot_s for o in answers if o.tpot_s is not None]


def calibrate(
    url: Annotated[str, typer.Argument(help="Base URL of one idle vLLM replica.")],
    max_batched_tokens: Annotated[int, typer.Option(help="The replica's --max-num-batched-tokens.", min=1)] = 2048,
    max_num_seqs: Annotated[int, typer.Option(help="The replica's --max-num-seqs.", min=1)] = 256,
    repeats: Annotated[int, typer.Option(help="Repetitions of every figure; the lower quartile counts.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the prompts: use a new one, or the cache answers.")] = 1,
    name: Annotated[str, typer.Option(help="Name of the profile.")] = "calibrated",
    out: Annotated[Path | None, typer.Option(help="Write the profile to this file too.")] = None,
) -> None:
    """Fits a step-time profile to a replica and prints it as JSON, for --profile FILE.

    Example: forebay calibrate http://127.0.0.1:8101 --max-num-seqs 32 --out tiny.json
    """
    console = Console(stderr=True)
    try:
        if out is not None:
            results.ready_file(out)
        known = asyncio.run(facts(url))
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(f"measuring {url}", total=len(PREFILLS) + len(DECODES))
            figures = asyncio.run(measure(url, known, max_batched_tokens, repeats, seed, lambda: bar.advance(task)))
    except (ReplicaError, BadUrlError, OSError, results.OutError) as problem:
        typer.echo(f"forebay calibrate: {problem}", err=True)
        raise typer.Exit(2) from None
    start = Profile(
        name, 0, 0, 0, 0, 0, num_blocks=known.num_blocks, block_size=known.block_size,
        max_num_batched_tokens=max_batched_tokens, max_num_seqs=max_num_seqs,
        source=f"fitted by forebay calibrate to {known.model}, {repeats} repetitions, seed {seed}",
    )  # fmt: skip
    profile = fit(figures, start)
    table = Table("figure", "measured ms", "fitted ms", "error %")
    for m in figures:
        ours = predicted_s(m, profile)
        error = (ours / m.seconds - 1) * 100
        table.add_row(m.label, f"{m.seconds * 1000:.1f}", f"{ours * 1000:.1f}", f"{error:+.1f}")
    console.print(table)
    text = dump(profile)
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n")
