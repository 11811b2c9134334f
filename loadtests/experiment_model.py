"""A fleet as queues, fast enough to repeat an experiment a thousand times: the ground on which designs are judged.

Each replica works off prefills in order: a request waits for what was sent there before, then takes
s = overhead + tokens x per_token + context term for what is not cached; a session's context is cached where its last
turn ran and nowhere else. Arrivals are Poisson with a rate that wanders; a request belongs to one of many sessions,
whose context grows by turns. Two policies: `spread` takes the shortest queue and forgets caches, `affinity` takes the
least of wait plus own work. So arms interfere as on a real fleet: one arm's misses are the other's wait.
All repetitions move together, one request of each per step, in numpy. Trade-off: no decode, batching or memory limit;
`experiment_engine.py` puts the same choices through the engine model and compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

SPREAD, AFFINITY, PILE = 0, 1, 2  # PILE: everything to the first replica; a deliberately bad arm
Floats: TypeAlias = NDArray[np.float64]
Singles: TypeAlias = NDArray[np.float32]
Small: TypeAlias = NDArray[np.int16]
Flags: TypeAlias = NDArray[np.bool_]


@dataclass(slots=True, frozen=True)
class World:
    """One kind of traffic on one fleet. Seconds, tokens; the physics are those of `profiles.py`, a100-8b."""

    replicas: int = 4
    rate_rps: float = 4.5
    wander: float = 0.1  # standard deviation of the log of the rate, drawn anew each `wander_s`
    wander_s: float = 45.0
    sessions: int = 120  # open at once
    turns: float = 2.0
    first_tokens: float = 3000.0
    turn_tokens: float = 1500.0
    spread: float = 0.6  # of the log of both
    objective_s: float = 0.35
    objective_per_token: float = 0.00005
    overhead_s: float = 0.004
    per_token_s: float = 72e-6  # with the fixed part of each step of 2,048 tokens
    per_context_s: float = 3.36e-9


@dataclass(slots=True)
class Traffic:
    """What arrives, in every repetition; arrays are [request, repetition]."""

    at: Floats  # seconds since the start
    slot: Small  # of the session
    first: Flags  # turn of its session
    before: Singles  # tokens of context from earlier turns
    prompt: Singles  # tokens, context included
    drawn: Singles  # the session's number in (0, 1): its arm or group
    bucket: NDArray[np.uint8]  # the session's, for split traffic


def traffic(world: World, seconds: float, repetitions: int, rng: np.random.Generator) -> Traffic:
    """Arrivals until every repetition has passed `seconds`; cut them by `at` afterwards."""
    at = _arrivals(world, seconds, repetitions, rng)
    n = at.shape[0]
    rows = np.arange(repetitions)
    context = np.zeros((repetitions, world.sessions), np.float32)
    number = rng.random((repetitions, world.sessions), np.float32)
    bucket = rng.integers(0, 256, (repetitions, world.sessions), np.uint8)
    slot = rng.integers(0, world.sessions, (n, repetitions), np.int16)
    first = rng.random((n, repetitions), np.float32) < 1.0 / world.turns
    first |= _unseen(slot)
    sizes = np.exp(world.spread * rng.standard_normal((n, repetitions), np.float32) - 0.5 * world.spread**2)
    prompt, before, drawn = (np.empty((n, repetitions), np.float32) for _ in range(3))
    buckets = np.empty((n, repetitions), np.uint8)
    for k in range(n):
        here, new = slot[k], first[k]
        fresh = np.flatnonzero(new)
        number[fresh, here[fresh]] = rng.random(fresh.size, np.float32)
        bucket[fresh, here[fresh]] = rng.integers(0, 256, fresh.size, np.uint8)
        earlier = np.where(new, np.float32(0), context[rows, here])
        tokens = earlier + sizes[k] * np.where(new, world.first_tokens, world.turn_tokens)
        before[k], prompt[k] = earlier, tokens
        drawn[k], buckets[k] = number[rows, here], bucket[rows, here]
        context[rows, here] = tokens
    return Traffic(at, slot, first, before, prompt, drawn, buckets)


def run(
    world: World, load: Traffic, policy: NDArray[np.int8], group: NDArray[np.int8] | None = None, groups: int = 1
) -> tuple[Singles, NDArray[np.int8]]:
    """Time to first token and replica of each request. policy: of each request; group: of a partition.

    The groups of a partition are columns of equal number, in order."""
    n, repetitions = policy.shape
    size = world.replicas // groups
    free = np.zeros(repetitions * world.replicas)  # when each replica has worked off what it has
    parts = free.reshape(repetitions, groups, size)
    whole = free.reshape(repetitions, world.replicas)
    rows = np.arange(repetitions)
    base, slots = rows * world.replicas, rows * world.sessions
    home = np.repeat(base, world.sessions)  # flat index of the replica
    full = _service(world, load.prompt, np.float32(0))
    hit = np.where(load.first, full, _service(world, load.prompt - load.before, load.before))
    sticks = (policy == AFFINITY) & ~load.first
    piles = policy == PILE if (policy == PILE).any() else None
    ttft = np.empty((n, repetitions), np.float32)
    chosen = np.empty((n, repetitions), np.int8)
    for k in range(n):
        now, here = load.at[k], slots + load.slot[k]
        if group is None:
            least = whole.argmin(1) + base
        else:
            part = group[k].astype(np.int64)
            least = parts[rows, part].argmin(1) + part * size + base
        if piles is not None:
            least = np.where(piles[k], base, least)
        known = home[here]
        wait_least = np.maximum(free[least] - now, 0.0)
        wait_home = np.maximum(free[known] - now, 0.0)
        stays = sticks[k] & (wait_home + hit[k] <= wait_least + full[k])
        taken = np.where(stays, known, least)
        first_s = np.where(stays, wait_home, wait_least) + np.where(taken == known, hit[k], full[k])
        free[taken] = now + first_s
        home[here] = taken
        ttft[k] = first_s
        chosen[k] = taken - base
    return ttft, chosen


def good(world: World, load: Traffic, ttft: Singles) -> Flags:
    """Which requests met their objective."""
    met: Flags = ttft <= world.objective_s + world.objective_per_token * load.prompt
    return met


def _service(world: World, tokens: Singles, context: Singles | np.float32) -> Singles:
    per_token = np.float32(world.per_token_s) + np.float32(world.per_context_s) * (context + np.float32(0.5) * tokens)
    made: Singles = np.float32(world.overhead_s) + tokens * per_token
    return made


def _arrivals(world: World, seconds: float, repetitions: int, rng: np.random.Generator) -> Floats:
    """Poisson with a piecewise constant rate, by stretching a unit process through the integral of the rate."""
    pieces = int(np.ceil(1.3 * seconds / world.wander_s)) + 2
    rate = world.rate_rps * np.exp(world.wander * rng.standard_normal((pieces, repetitions)) - 0.5 * world.wander**2)
    passed = np.vstack([np.zeros(repetitions), np.cumsum(rate * world.wander_s, 0)])
    edges = np.arange(pieces + 1) * world.wander_s
    most = np.max([np.interp(seconds, edges, passed[:, r]) for r in range(repetitions)])
    n = int(most + 4 * np.sqrt(most)) + 1
    unit = np.cumsum(rng.standard_exponential((n, repetitions)), 0)
    at = np.empty((n, repetitions))
    for r in range(repetitions):
        at[:, r] = np.interp(unit[:, r], passed[:, r], edges, right=np.inf)
    last = int((at <= seconds).sum(0).max())
    return at[:last]


def _unseen(slot: Small) -> Flags:
    """The first request of each slot."""
    out = np.zeros(slot.shape, np.bool_)
    for r in range(slot.shape[1]):
        _, where = np.unique(slot[:, r], return_index=True)
        out[where, r] = True
    return out
