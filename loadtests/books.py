"""Conservation: cores, engines and clients must agree on what is open and on every token.

A simulator that loses a request makes its policy look better; so a run whose books do not balance has no result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loadtests.results import ConservationError
from policies.core import Balancer

if TYPE_CHECKING:
    from loadtests.simreplica import Flight, SimReplica


def check(
    flights: Mapping[str, Flight], cores: Sequence[Balancer], replicas: Mapping[str, SimReplica], held: int
) -> None:
    """Raises ConservationError unless cores, engines and clients agree on what is open and on every token."""
    known = sum(int(core.snapshot()["open"]) for core in cores)
    if known != len(flights):
        raise ConservationError(f"{len(flights)} requests are open, the cores hold {known}")
    waiting = sum(f.replica is None for f in flights.values())
    if waiting != held:
        raise ConservationError(f"{waiting} requests are held, the count says {held}")
    for replica in replicas.values():
        counters = replica.engine.counters
        made = sum(replica.engine.outputs(job) for job in replica.jobs)
        if made != counters.generation_tokens:
            raise ConservationError(f"{replica.id}: {counters.generation_tokens} tokens generated, attempts got {made}")
        served = sum(job.prompt_tokens for job in replica.jobs if replica.engine.outputs(job) > 0)
        if served != counters.prompt_tokens:
            raise ConservationError(
                f"{replica.id}: {counters.prompt_tokens} prompt tokens prefilled, attempts had {served}"
            )
