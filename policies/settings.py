"""What an operator may switch or set in the core, with units in the names; every field has a default.

The three switches make an arm (`arms.py`): `admission` is late binding, feasibility, pruning and shares;
`pacing` bounds the time each replica spends in prefill; `working_set` admits new conversations only
while the cached ones fit. All off means immediate dispatch by the routing policy alone. Nothing here
describes an engine: rates, step times and capacities are learnt (the priors only start the learning).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(slots=True, frozen=True)
class Settings:
    admission: bool = True
    pacing: bool = True
    working_set: bool = True

    # dispatch and retries
    max_attempts: int = 3  # dispatches of one request, the first included
    alternatives: int = 3  # recorded with each decision; 0: none
    panic_share: float = 0.5  # statistical ejections count only while at least this share stays available

    # late binding (science: keep one round trip of work in the engine, hold the rest where it can be ordered)
    backlog_s: float = 0.25  # prefill seconds a replica may hold before it gets more
    max_held: int = 10_000  # requests held, over all models
    max_held_bytes: int = 1 << 30  # prompt bytes held
    default_max_wait_s: float = 600.0  # hold of a request that has no deadline of any kind
    size_fairness: float = 2.0  # a prompt-length quartile is shed at most this many times the average; inf: unbounded
    target_attainment: float = 0.95  # of admitted requests; what the margins are learnt for
    sticky_shed_s: float = 10.0  # a session that was shed stays shed this long while the overload lasts

    # pacing
    pace: float | None = None  # a fixed share of time in prefill instead of the learnt pace
    pace_near_share: float = 0.05  # of live streams near their TPOT objective above which prefill waits
    pace_trickle: float = 0.1  # share of time in prefill that is allowed even then

    # KV and working set
    kv_limit: float = 0.92  # share of KV tokens interactive work may fill
    kv_limit_batch: float = 0.80
    kv_penalty: float = 0.10  # taken off both limits after a preemption
    kv_penalty_s: float = 5.0
    working_set_share: float = 0.7  # of the fleet's KV capacity, where the learning starts

    # priors of the predictor, until it has learnt
    prior_prefill_rate: float = 8000.0  # tokens/s
    prior_overhead_s: float = 0.05
    prior_decode_step_s: float = 0.015
    prior_bytes_per_token: float = 4.0

    def without_science(self) -> Settings:
        """The same settings with immediate dispatch: what every bare baseline runs with."""
        return replace(self, admission=False, pacing=False, working_set=False)

    @property
    def holds(self) -> bool:
        """Whether requests may wait in the core at all."""
        return self.admission or self.pacing or self.working_set


def chosen(settings: Settings | Mapping[str, Any] | None) -> Settings:
    """Settings as they are, from a mapping of their names, or the defaults. Raises ValueError naming what is wrong."""
    if isinstance(settings, Settings):
        return settings
    known = {f.name: f.default for f in fields(Settings)}
    for name, value in (settings or {}).items():
        if name not in known:
            raise ValueError(f"setting {name!r} is not known; one of {', '.join(sorted(known))} would be right")
        default = known[name]
        flag = isinstance(default, bool)
        optional = value is None and default is None
        if not optional and (isinstance(value, bool) is not flag or not isinstance(value, int | float)):
            raise ValueError(f"setting {name!r} is {value!r}; {'true or false' if flag else 'a number'} would be right")
    return Settings(**(settings or {}))
