"""The queue model's choices put through engine models: does the simple fleet answer as the real scheduler would?

One repetition's requests go to the replicas that the queue model chose, at its times, into `engine.py` with its steps,
chunked prefill, batching, prefix blocks and decodes; compared are attainment and times to first token, by policy, and
the difference between policies, which is what experiments are about. What must agree is the difference; levels differ
by what the model leaves out (two steps of latency, decodes beside prefills).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtests.engine import Engine, EngineConfig, Job
from loadtests.experiment_model import AFFINITY, SPREAD, Flags, Singles, Traffic, World, good, run
from loadtests.seeds import mix

ANSWER_TOKENS = 24  # short answers, as prefill is what the model has
AHEAD_S = 10.0  # decode-only steps made up at once; arrivals cut them short


@dataclass(slots=True, frozen=True)
class Agreement:
    """Attainment and mean TTFT by policy, of the queue model and of the engines."""

    model: dict[int, tuple[float, float]]
    engine: dict[int, tuple[float, float]]

    @property
    def differences(self) -> tuple[float, float]:
        """Affinity minus spread in attainment: model, engine."""
        return tuple(side[AFFINITY][0] - side[SPREAD][0] for side in (self.model, self.engine))  # type: ignore[return-value]


def agreement(world: World, load: Traffic, repetition: int, seconds: float) -> Agreement:
    """Both policies over one repetition of the traffic."""
    model: dict[int, tuple[float, float]] = {}
    engine: dict[int, tuple[float, float]] = {}
    inside: Flags = load.at[:, repetition] <= seconds
    for policy in (SPREAD, AFFINITY):
        ttft, chosen = run(world, load, np.full(load.at.shape, policy, np.int8))
        seen = through_engines(world, load, chosen, repetition, seconds)
        for side, times in ((model, ttft[:, repetition]), (engine, seen)):
            met = good(world, _one(load, repetition), times[:, None])[:, 0]
            side[policy] = (float(met[inside].mean()), float(times[inside].mean()))
    return Agreement(model, engine)


def through_engines(world: World, load: Traffic, chosen: NDArray[np.int8], repetition: int, seconds: float) -> Singles:
    """Seconds to first token of each request that came by `seconds`, in order of arrival; the rest are 0."""
    engines = [Engine(EngineConfig()) for _ in range(world.replicas)]
    block = engines[0].unit_tokens
    ends = [float("inf")] * world.replicas
    jobs: list[tuple[int, Job]] = []
    chains: dict[int, list[int]] = {}
    serial = 0

    def settle(until: float) -> None:
        while min(ends) <= until:
            i = ends.index(min(ends))
            step = engines[i].step(ends[i], AHEAD_S + ends[i])
            ends[i] = float("inf") if step is None else step.end
            if step is not None:
                for job in step.first:
                    job.first_token_at = step.end

    for k in range(load.at.shape[0]):
        at = float(load.at[k, repetition])
        if at > seconds:
            break
        settle(at)
        slot, prompt = int(load.slot[k, repetition]), max(1, round(float(load.prompt[k, repetition])))
        if load.first[k, repetition] or slot not in chains:
            serial += 1
            chains[slot] = []
        chain = chains[slot]
        chain += [mix(serial, j) for j in range(len(chain), -(-prompt // block))]
        job = Job(f"{k}", prompt, ANSWER_TOKENS, tuple(chain[: -(-prompt // block)]))
        i = int(chosen[k, repetition])
        engines[i].add(job, at)
        current = engines[i].current
        if current is None:
            step = engines[i].step(at, AHEAD_S + at)
            assert step is not None
            for first in step.first:
                first.first_token_at = step.end
            ends[i] = step.end
        else:
            ends[i] = current.end
        jobs.append((k, job))
    settle(float("inf") if not jobs else jobs[-1][1].arrived_at + 600.0)
    out = np.zeros(load.at.shape[0], np.float32)
    for k, job in jobs:
        assert job.first_token_at is not None
        out[k] = job.first_token_at - job.arrived_at
    return out


def _one(load: Traffic, repetition: int) -> Traffic:
    """One repetition alone."""
    r = slice(repetition, repetition + 1)
    return Traffic(
        load.at[:, r], load.slot[:, r], load.first[:, r], load.before[:, r], load.prompt[:, r], load.drawn[:, r],
        load.bucket[:, r],
    )  # fmt: skip
