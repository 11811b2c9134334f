"""The tables of the configuration that steer the decision core, and their meaning as `policies.settings.Settings`.

Every value here has a default that was measured or is learnt; an operator needs none of them to begin with. Switches
are combined with the arm: `policy.name = "forebay"` runs with everything on, any other bare name dispatches at once,
`NAME+admission+pacing` adds parts to it, and `enabled = false` takes a part out again.
"""

from __future__ import annotations

from pydantic import Field

from gateway.sections import RateOrNone, Seconds, Share, Table
from policies.settings import Settings


class Admission(Table):
    enabled: bool = True
    """Holds requests until a replica can start them, and refuses those that cannot meet their objectives."""
    backlog_s: Seconds = 0.25
    """Prefill time that a replica may hold before it is given more; the rest waits here, where it can be ordered."""
    max_wait_s: Seconds = 600.0
    """Longest hold of a request that has no deadline of any kind."""
    size_fairness: float = Field(default=2.0, ge=1)
    """No quartile of prompt lengths is shed more than this many times the average."""
    target_attainment: float = Field(default=0.95, gt=0, lt=1)
    """Share of admitted requests that should meet their objectives; the safety margins are learnt for it."""
    sticky_shed_s: float = Field(default=10.0, ge=0)
    """A session that was shed stays shed for this long while the overload lasts."""


class Pacing(Table):
    enabled: bool = True
    """Bounds the time each replica spends in prefill, so that the streams it carries keep their pace."""
    prefill_share: RateOrNone = None
    """A fixed share of time for prefill; "none" learns it."""
    near_share: Share = 0.05
    """Share of a replica's streams near their TPOT objective above which new prefill waits."""
    trickle_share: Share = 0.1
    """Share of time that prefill gets even then."""


class WorkingSet(Table):
    enabled: bool = True
    """Admits a new conversation only while the cached ones fit into the fleet's KV capacity."""
    share: Share = 0.7
    """Share of that capacity where the learning starts."""


class Kv(Table):
    limit_share: Share = 0.92
    """Share of KV tokens that may be filled."""
    batch_limit_share: Share = 0.80
    """The same for classes that only fill."""
    penalty_share: Share = 0.10
    """Taken off both after a preemption was seen."""
    penalty_s: Seconds = 5.0
    """How long it stays taken off."""


class Priors(Table):
    prefill_tokens_per_s: float = Field(default=8000.0, gt=0)
    """Prefill speed assumed of a replica until it is learnt."""
    overhead_s: Seconds = 0.05
    """Time to first token of a very short prompt, until it is learnt."""
    decode_step_s: Seconds = 0.015
    """Time per output token, until it is learnt."""
    bytes_per_token: float = Field(default=4.0, gt=0)
    """Prompt bytes per token, until it is learnt."""


def settings(
    admission: Admission,
    pacing: Pacing,
    working_set: WorkingSet,
    kv: Kv,
    priors: Priors,
    *,
    max_attempts: int,
    alternatives: int,
    panic_share: float,
    max_held: int,
    max_held_bytes: int,
) -> Settings:
    """The core's settings before the arm has its say."""
    return Settings(
        admission=admission.enabled,
        pacing=pacing.enabled,
        working_set=working_set.enabled,
        max_attempts=max_attempts,
        alternatives=alternatives,
        panic_share=panic_share,
        backlog_s=admission.backlog_s,
        max_held=max_held,
        max_held_bytes=max_held_bytes,
        default_max_wait_s=admission.max_wait_s,
        size_fairness=admission.size_fairness,
        target_attainment=admission.target_attainment,
        sticky_shed_s=admission.sticky_shed_s,
        pace=pacing.prefill_share,
        pace_near_share=pacing.near_share,
        pace_trickle=pacing.trickle_share,
        kv_limit=kv.limit_share,
        kv_limit_batch=kv.batch_limit_share,
        kv_penalty=kv.penalty_share,
        kv_penalty_s=kv.penalty_s,
        working_set_share=working_set.share,
        prior_prefill_rate=priors.prefill_tokens_per_s,
        prior_overhead_s=priors.overhead_s,
        prior_decode_step_s=priors.decode_step_s,
        prior_bytes_per_token=priors.bytes_per_token,
    )
