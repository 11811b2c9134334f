"""The fleet of a virtual run: replicas, gateways, how old what they know is, and what goes wrong when.

Trade-off: a network takes no time here and a gateway no CPU; both are milliseconds against prefills of seconds, and
the cost of a gateway is measured on its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, isfinite

from loadtests.engine import EngineConfig
from loadtests.profiles import Profile

HAND_DELAY_S = (0.00025, 0.005)  # one way between hand and core, median and p99: as measured on a busy machine
KINDS = ("slow", "lost", "restarted", "added")


@dataclass(slots=True, frozen=True)
class Incident:
    """Something that happens to one replica at a time of the schedule (seconds from the start of the window)."""

    kind: str  # slow: steps take `factor` times as long; lost; restarted: back cold after `down_s`; added: joins cold
    at_s: float
    replica: int  # index; for `added` the next index
    factor: float = 2.0
    down_s: float = 30.0
    until_s: float | None = None  # end of `slow`

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"incident {self.kind!r} is not one of: {', '.join(KINDS)}")


LORA_LOAD_S = 0.5  # assumed: an adapter of some hundred MB from disk to the GPU


@dataclass(slots=True, frozen=True)
class Scenario:
    """Everything around the schedule that shapes a virtual run."""

    engines: tuple[EngineConfig, ...]  # one per replica
    gateways: int = 1
    scrape_s: float = 1.0
    scrape_age_s: float = 0.0  # how old the values already are when they are read
    pulse_s: float = 0.05
    peers: bool = False  # gateways tell each other their load every 100 ms
    shared_index: bool = False  # gateways share a sparse index of prefixes
    patience: bool = False  # clients leave when their answer can no longer be on time
    hands: int = 0  # workers of each gateway that carry requests to its core; 0: one process does both
    hand_delay_s: tuple[float, float] = HAND_DELAY_S
    incidents: tuple[Incident, ...] = field(default=())

    def __post_init__(self) -> None:
        there = len(self.engines)
        for incident in sorted(self.incidents, key=lambda one: one.at_s):
            if incident.kind == "added":
                there += 1
            elif not 0 <= incident.replica < there:
                raise ValueError(
                    f"incident {incident.kind}:{incident.replica}@{incident.at_s:g}: "
                    f"there are replicas 0 to {there - 1} then"
                )


def uniform(profile: Profile, replicas: int, budget: int | None = None, unit_tokens: int = 512) -> Scenario:
    """`replicas` alike. `unit_tokens` is the schedule's block size: one id of a prompt's chain."""
    return Scenario((engine(profile, budget, unit_tokens),) * replicas)


def engine(profile: Profile, budget: int | None, unit_tokens: int) -> EngineConfig:
    if unit_tokens % profile.block_size:
        raise ValueError(
            f"profile {profile.name}: block_size {profile.block_size} does not divide the schedule's {unit_tokens}"
        )
    return EngineConfig(
        profile=profile,
        max_num_batched_tokens=budget,
        max_num_seqs=None if budget is None else min(profile.max_num_seqs, budget),  # vLLM starts with no more
        unit_tokens=unit_tokens,
        max_loras=8,
        lora_load_s=LORA_LOAD_S,
    )


def slowed(profile: Profile, factor: float) -> Profile:
    """The same replica with every part of a step `factor` times as long."""
    return replace(
        profile,
        floor_s=profile.floor_s * factor,
        base_s=profile.base_s * factor,
        per_token_s=profile.per_token_s * factor,
        per_context_token_s=profile.per_context_token_s * factor,
        per_chunk_context_s=profile.per_chunk_context_s * factor,
        overhead_s=profile.overhead_s * factor,
        per_sequence_s=profile.per_sequence_s * factor,
    )


def parse_incident(text: str) -> Incident:
    """`slow:3@60x2`, `lost:0@120`, `restarted:1@60+30`, `added:8@100`: kind, replica, time, factor or seconds down."""
    kind, _, rest = text.partition(":")
    index, _, when = rest.partition("@")
    try:
        at, factor, down = when, "2", "30"
        if "x" in when:
            at, _, factor = when.partition("x")
        if "+" in when:
            at, _, down = when.partition("+")
        made = Incident(kind, float(at), int(index), float(factor), float(down))
        if not (isfinite(made.at_s) and 0 < made.factor < inf and 0 <= made.down_s < inf):
            raise ValueError("times must be finite, the factor above 0")
        return made
    except ValueError as error:
        raise ValueError(
            f"incident {text!r} ({error}); slow:3@60x2, lost:0@120, restarted:1@60+30 or added:8@100 would be right"
        ) from None
