"""What goes wrong in a virtual run: replicas that slow down, die, come back cold or join.

A dead process resets its connections, so gateways with streams there know at once; the others find out when a
connect is refused. What had no first token yet is retried by the core; what had is truncated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadtests.scenario import Incident, slowed
from policies.model import Ejected, Outcome, Restarted, Returned
from policies.objectives import Partition

if TYPE_CHECKING:
    from loadtests.simreplica import SimReplica
    from loadtests.virtual import Simulation


def happen(simulation: Simulation, incident: Incident, what: str, now: float) -> None:
    """`what` is the incident's kind, or the end of it: usual, back. Raises ValueError for an unknown replica."""
    if what == "added":
        engines = simulation.scenario.engines
        simulation.join(engines[incident.replica % len(engines)], now)
        return
    replica = simulation.replicas.get(f"r{incident.replica}")
    if replica is None:
        raise ValueError(f"incident {incident.kind}: there is no replica {incident.replica}")
    if what == "slow":
        replica.engine.profile = slowed(replica.config.profile, incident.factor)
        if incident.until_s is not None:
            simulation.happens(incident.until_s, incident, "usual")
    elif what == "usual":
        replica.engine.profile = replica.config.profile
    elif what == "back":
        replica.restart(now)
        replica.alive = True
        for gateway, core in enumerate(simulation.cores):
            simulation.decide(gateway, core.fleet_event(Restarted(replica.id), now), now)
            simulation.decide(gateway, core.fleet_event(Returned(replica.id), now), now)
    else:
        _lose(simulation, replica, now)
        if what == "restarted":
            simulation.happens(now + incident.down_s, incident, "back")


def _lose(simulation: Simulation, replica: SimReplica, now: float) -> None:
    simulation.account(replica, now)
    replica.alive = False
    flights = list(replica.open.values())
    for gateway, core in enumerate(simulation.cores):
        if any(f.gateway == gateway for f in flights):
            simulation.decide(gateway, core.fleet_event(Ejected(replica.id, "connection reset"), now), now)
    for flight in flights:
        core = simulation.cores[flight.gateway]
        started = flight.first_at is not None
        simulation.leave_replica(flight, now)
        if started:
            flight.record.reason = "replica lost"
            more = core.complete(flight.request.id, Outcome.TRUNCATED, None, now)
            simulation.finish(flight, Partition.TRUNCATED, now)
        else:
            simulation.held += 1
            more = core.failed(flight.request.id, Outcome.ERROR, now)
        simulation.decide(flight.gateway, more, now)
