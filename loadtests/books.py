"""Conservation: cores, engines and clients must agree on what is open and on every token.

A simulator that loses a request makes its policy look better; so a run whose books do not balance has no result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loadtests.record import Record
from loadtests.results import ConservationError
from loadtests.schedule import Schedule
from policies.core import Balancer
from policies.objectives import Partition

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


def unfinished(flights: Mapping[str, Flight], schedule: Schedule, records: Mapping[int, Record]) -> None:
    """What is open at the end, and why turns of a session were never sent."""
    for flight in flights.values():
        flight.record.partition = Partition.UNFINISHED
        replica, job = flight.replica, flight.job
        if replica is not None and job is not None:
            flight.record.completion_tokens = replica.engine.outputs(job)
    for rows in schedule.sessions.values():
        failed = False
        for row in rows:
            record = records[row.id]
            if record.scheduled_s is None:
                record.reason = "behind a failed turn" if failed else "not reached by the end of the run"
            elif not record.complete and record.partition is not Partition.UNFINISHED:
                failed = True
