"""The simulator's loop: the real Balancer against engine models, on a heap of events in virtual time.

Nothing here decides anything about routing: it is a shell like the gateway's, with a heap where that has sockets.
Clients send at the scheduled times, later turns of a session when the answer before them has come and the user has
thought; the run ends at W + D and what is then open is unfinished. The books are checked at the end: every request
in exactly one partition, as many open in the cores as here, every prompt and output token of the engines
belonging to some attempt. Trade-off: equal seeds give equal bits, so there is no jitter that the seed does not hold.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from loadtests import results
from loadtests.books import check, unfinished
from loadtests.engine import Job
from loadtests.gateways import PEER_S, RING_S, Peers, RequestMaker
from loadtests.incidents import happen
from loadtests.record import Record
from loadtests.results import ConservationError
from loadtests.scenario import Incident, Scenario
from loadtests.schedule import Row, Schedule, longest_on_time_s
from loadtests.seeds import mix
from loadtests.simreplica import Flight, SimReplica
from policies.core import Balancer
from policies.model import Abort, Added, Decision, Dispatch, Ejected, Outcome, Pulse, Shed, Usage
from policies.objectives import Partition, Timing, judge

ARRIVE, STEP, PULSE, SCRAPE, DELIVER, WAKE, INCIDENT, PATIENCE, PEERS, CALL = range(10)
LAZY_S = 0.5
Told = Callable[[Balancer, float], list[Decision]]


@dataclass
class Outcomes:
    """What a run leaves: one record per row, and what only the simulator knows."""

    records: list[Record]
    sampled_s: list[float] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # requests in the gateways' queues, at the times sampled
    waiting: list[int] = field(default_factory=list)  # in the engines' queues
    preemptions: int = 0
    adapter_loads: int = 0
    queue_max: dict[str, int] = field(default_factory=dict)
    events: int = 0


class Simulation:
    """One run. `cores` are the gateways' balancers, empty of replicas."""

    def __init__(self, schedule: Schedule, scenario: Scenario, cores: Sequence[Balancer], seed: int = 0) -> None:
        self.schedule = schedule
        self.scenario = scenario
        self.cores = cores
        self.seed = seed
        self.end_s = schedule.window_s + schedule.drain_s
        self.replicas: dict[str, SimReplica] = {}
        self.flights: dict[str, Flight] = {}
        self.maker = RequestMaker(schedule, scenario.shared_index)
        self.peers = Peers(cores)
        self.out = Outcomes([])
        # who does not pace reads only the sums of gaps, and those are the same however often they are told
        self.pulse_s = scenario.pulse_s if any(c.settings.pacing for c in cores) else max(scenario.pulse_s, LAZY_S)
        self.progress: Callable[[float], None] | None = None  # told the virtual time now and then
        self._heap: list[tuple[float, int, int, Any]] = []
        self._seq = 0
        self._wakes: list[float | None] = [None] * len(cores)
        self._counted = {row.id for row in schedule.cohort}
        self._records: dict[int, Record] = {}
        self.held = 0

    # -- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> Outcomes:
        """Raises ConservationError when the books do not balance."""
        start = min((r.at_s for r in self.schedule.rows if r.at_s is not None), default=0.0)
        now = min(0.0, start)
        for config in self.scenario.engines:
            self.join(config, now)
        for row in self.schedule.rows:
            self._records[row.id] = Record.of(row, row.id in self._counted)
            if row.at_s is not None:
                self.push(row.at_s, ARRIVE, row)
        self.push(now + self.pulse_s, PULSE, None)
        self.push(now + self.scenario.scrape_s, SCRAPE, None)
        if self.scenario.peers and len(self.cores) > 1:
            self.push(now + PEER_S, PEERS, None)
        for incident in self.scenario.incidents:
            self.happens(incident.at_s, incident, incident.kind)
        handlers = (
            self._arrive, self._step, self._pulse, self._scrape, self._deliver, self._wake, self._incident,
            self._patience, self._peers, lambda what, at: what(at),
        )  # fmt: skip
        heap, end = self._heap, self.end_s
        while heap and heap[0][0] < end:
            now, _, kind, payload = heapq.heappop(heap)
            self.out.events += 1
            handlers[kind](payload, now)
        self._close()
        return self.out

    def push(self, at: float, kind: int, payload: Any) -> None:
        self._seq += 1
        heapq.heappush(self._heap, (at, self._seq, kind, payload))

    def happens(self, at: float, incident: Incident, what: str) -> None:
        self.push(at, INCIDENT, (incident, what))

    # -- requests ----------------------------------------------------------------------------------------------

    def _arrive(self, row: Row, now: float) -> None:
        record = self._records[row.id]
        record.scheduled_s = record.dispatched_s = now
        gateway = mix(self.seed, row.id) % len(self.cores) if len(self.cores) > 1 else 0
        request = self.maker.request(row, now)
        flight = Flight(row, record, request, gateway)
        self.flights[request.id] = flight
        self.held += 1
        if self.scenario.patience:
            bound = longest_on_time_s(self.schedule.objectives(row), row.output_tokens)
            if bound is not None:
                self.push(now + bound, PATIENCE, flight)
        self.decide(gateway, self.told(flight, lambda core, at: core.submit(request, at), now), now)

    def told(self, flight: Flight, what: Told, now: float) -> list[Decision]:
        """Something about a request, told to its core; what the core decides at once."""
        return what(self.cores[flight.gateway], now)

    def decide(self, gateway: int, decisions: Iterable[Decision], now: float) -> None:
        todo = deque(decisions)
        while todo:
            decision = todo.popleft()
            flight = self.flights.get(decision.request_id)
            if flight is None or flight.over:
                raise ConservationError(
                    f"{type(decision).__name__} for request {decision.request_id}, which is not open"
                )
            todo.extend(self.carry_out(flight, decision, now))
        self._arm(gateway)

    def carry_out(self, flight: Flight, decision: Decision, now: float) -> list[Decision]:
        """One decision about an open request; what the core says to what comes of it."""
        if isinstance(decision, Dispatch):
            return self._dispatch(flight, decision, now)
        if isinstance(decision, Shed):
            self.leave_replica(flight, now)
            hopeless = decision.retry_after_s is None
            flight.record.reason = results.EVEN_IDLE if hopeless else decision.reason
            self.finish(flight, Partition.REJECTED, now)
        elif isinstance(decision, Abort):
            self.leave_replica(flight, now)
            if decision.requeue:
                self.held += 1
                return []
            late = decision.reason == "expired"
            flight.record.reason = decision.reason
            more = self.ended(flight, Outcome.EXPIRED if late else Outcome.ERROR, None, now)
            self.finish(flight, Partition.SLOW_E2E if late else Partition.ERROR_HTTP, now)
            return more
        return []

    def ended(self, flight: Flight, outcome: Outcome, usage: Usage | None, now: float) -> list[Decision]:
        return self.told(flight, lambda core, at: core.complete(flight.request.id, outcome, usage, at), now)

    def attempt_failed(self, flight: Flight, outcome: Outcome, now: float) -> list[Decision]:
        return self.told(flight, lambda core, at: core.failed(flight.request.id, outcome, at), now)

    def _dispatch(self, flight: Flight, decision: Dispatch, now: float) -> list[Decision]:
        replica = self.replicas[decision.replica_id]
        row, record = flight.row, flight.record
        if flight.replica is not None:
            raise ConservationError(
                f"request {flight.request.id} is dispatched to {replica.id} while on {flight.replica.id}"
            )
        if record.queue_s is None:
            record.queue_s = now - flight.request.received_at
        flight.attempts += 1
        record.attempts = flight.attempts
        record.replica = replica.id
        if not replica.alive:
            more = self.cores[flight.gateway].fleet_event(Ejected(replica.id, "connect refused"), now)
            return [*more, *self.attempt_failed(flight, Outcome.ERROR, now)]
        job = Job(
            f"{row.id}.{flight.attempts}",
            row.prompt_tokens,
            row.output_tokens,
            self.maker.held_after(row),
            adapter=row.adapter,
            tag=flight,
        )
        flight.job, flight.first_at, flight.stalled_at, flight.gap_s = job, None, None, 0.0
        try:
            refused = replica.engine.add(job, now)
        except ValueError as error:
            record.reason, record.http = str(error), 400
            more = self.ended(flight, Outcome.CLIENT_ERROR, None, now)
            self.held -= 1
            self.finish(flight, Partition.ERROR_HTTP, now)
            return more
        if refused is not None:
            record.reason = refused
            return self.attempt_failed(flight, Outcome.BACKPRESSURE, now)
        self.held -= 1
        flight.replica = replica
        replica.open[flight.request.id] = flight
        replica.jobs.append(job)
        core = self.cores[flight.gateway]
        self.maker.went_to(row, core.fleet.replicas[replica.id], now)
        if self.scenario.peers and core.long(decision):
            others = [g for g in range(len(self.cores)) if g != flight.gateway]
            self.push(now + RING_S, CALL, partial(self._exchange, others))
        if replica.engine.current is None:
            replica.wake_up(now)
        self._follow(replica)
        return []

    def leave_replica(self, flight: Flight, now: float) -> None:
        """The attempt is over before its end: out of the engine, its tokens wasted."""
        replica, job = flight.replica, flight.job
        if replica is None or job is None:
            self.held -= 1
            return
        flight.record.wasted_tokens += max(0, replica.engine.outputs(job, replica.engine.progress(now)[0]))
        if replica.alive:
            replica.engine.cancel(job, now)
            self._follow(replica)
        self._off(flight, replica)

    def _off(self, flight: Flight, replica: SimReplica) -> None:
        replica.open.pop(flight.request.id, None)
        replica.live[flight.gateway].pop(flight.request.id, None)
        flight.replica = None

    def finish(self, flight: Flight, partition: Partition, now: float) -> None:
        record = flight.record
        record.partition = partition
        record.end_s = now
        flight.over = True
        del self.flights[flight.request.id]
        following = self.maker.following.get(flight.row.id)
        if following is not None and record.complete:
            self.push(now + following.think_s, ARRIVE, following)

    # -- replicas ----------------------------------------------------------------------------------------------

    def join(self, config: Any, now: float) -> None:
        replica = SimReplica(f"r{len(self.replicas)}", config, len(self.cores), now)
        self.replicas[replica.id] = replica
        for g, core in enumerate(self.cores):
            self.decide(g, core.fleet_event(Added(replica.id), now), now)

    def _follow(self, replica: SimReplica) -> None:
        """Keep one event in the heap for the end of the step under way."""
        step = replica.engine.current
        end = None if step is None else step.end
        if end is not None and end != replica.event_end:
            self.push(end, STEP, (replica, replica.engine))
        replica.event_end = end

    def account(self, replica: SimReplica, now: float) -> None:
        replica.account(now, self.cores)

    def _step(self, payload: Any, now: float) -> None:
        replica, engine = payload
        step = engine.current
        if engine is not replica.engine or not replica.alive or step is None or step.end != now:
            return  # the step was shortened, or the process is gone
        engine.step(now, float("inf"))
        replica.event_end = None
        self._follow(replica)
        self.account(replica, now)
        for job in step.preempted:
            if job.tag.stalled_at is None and job.tag.first_at is not None:
                job.tag.stalled_at = step.start
        for job in step.resumed:
            flight = job.tag
            if flight.stalled_at is not None:
                flight.gap_s = max(flight.gap_s, now - flight.stalled_at)
                flight.stalled_at = None
        for job in step.first:
            self._first_token(job.tag, replica, now)
        for job in step.finished:
            self._answered(job.tag, replica, now)

    def _first_token(self, flight: Flight, replica: SimReplica, now: float) -> None:
        flight.start(now)
        assert flight.job is not None
        flight.record.cached_tokens = flight.job.cached_tokens
        flight.record.served_prompt_tokens = flight.row.prompt_tokens
        replica.live[flight.gateway][flight.request.id] = flight
        self.decide(
            flight.gateway, self.told(flight, lambda core, at: core.first_token(flight.request.id, at), now), now
        )

    def _answered(self, flight: Flight, replica: SimReplica, now: float) -> None:
        record, row, job = flight.record, flight.row, flight.job
        if flight.over or flight.replica is not replica or job is None or flight.first_at is None:
            return
        self._off(flight, replica)
        start = flight.request.received_at
        record.last_s = now
        record.completion_tokens = job.outputs
        record.longest_gap_s = max(flight.gap_s, replica.longest_gap_s(flight.first_at) if job.outputs > 1 else 0.0)
        record.complete = True
        timing = Timing(flight.first_at - start, now - start, now - start, job.outputs, record.longest_gap_s)
        partition = judge(timing, self.schedule.objectives(row))
        usage = Usage(row.prompt_tokens, job.outputs, job.cached_tokens)
        self.maker.went_to(row, self.cores[flight.gateway].fleet.replicas[replica.id], now, job.outputs)
        self.finish(flight, partition, now)
        self.decide(flight.gateway, self.ended(flight, Outcome.SUCCESS, usage, now), now)

    # -- timers ------------------------------------------------------------------------------------------------

    def _arm(self, gateway: int) -> None:
        due = self.cores[gateway].next_wake()
        held = self._wakes[gateway]
        if due is not None and (held is None or due < held):
            self._wakes[gateway] = due
            self.push(due, WAKE, (gateway, due))

    def _wake(self, payload: Any, now: float) -> None:
        gateway, due = payload
        if self._wakes[gateway] != due:
            return
        self._wakes[gateway] = None
        self.decide(gateway, self.cores[gateway].wake(now), now)

    def _pulse(self, _: Any, now: float) -> None:
        for replica in self.replicas.values():
            if not any(replica.live) and not any(g.idle or g.busy for g in replica.gaps):
                continue
            tick = replica.account(now, self.cores)
            for g, gaps in enumerate(replica.gaps):
                if replica.live[g] or gaps.idle or gaps.busy:
                    told = partial(self.pulsed, g, replica.id, replica.pulse(g, now, tick))
                    self.push(now + self.pulse_s * g / len(self.cores), CALL, told) if g else told(now)  # never at once
        for g in range(len(self.cores)):
            self._arm(g)
        self.push(now + self.pulse_s, PULSE, None)

    def pulsed(self, gateway: int, replica_id: str, pulse: Pulse, now: float) -> None:
        decisions = self.cores[gateway].pulse(replica_id, pulse, now)
        if decisions:
            self.decide(gateway, decisions, now)

    def _scrape(self, _: Any, now: float) -> None:
        age = self.scenario.scrape_age_s
        for replica in self.replicas.values():
            if replica.alive:
                self.push(now + age, DELIVER, replica.scrape(now, now + age))
        self.out.sampled_s.append(now)
        self.out.held.append(self.held)
        self.out.waiting.append(sum(len(r.open) for r in self.replicas.values() if r.alive))
        if self.progress is not None:
            self.progress(now)
        self.push(now + self.scenario.scrape_s, SCRAPE, None)

    def _deliver(self, scraped: Any, now: float) -> None:
        for g, core in enumerate(self.cores):
            self.decide(g, core.fleet_event(scraped, now), now)

    def _peers(self, _: Any, now: float) -> None:
        self._exchange(range(len(self.cores)), now)
        self.push(now + PEER_S, PEERS, None)

    def _exchange(self, gateways: Iterable[int], now: float) -> None:
        for g, decisions in self.peers.exchange(gateways, self.replicas, now):
            self.decide(g, decisions, now)

    def _patience(self, flight: Flight, now: float) -> None:
        if flight.over:
            return
        self.leave_replica(flight, now)
        self.decide(flight.gateway, self.ended(flight, Outcome.CANCELLED, None, now), now)
        flight.record.reason = "patience"
        self.finish(flight, Partition.ABANDONED, now)

    def _incident(self, payload: Any, now: float) -> None:
        incident, what = payload
        happen(self, incident, what, now)

    # -- the books ---------------------------------------------------------------------------------------------

    def _close(self) -> None:
        unfinished(self.flights, self.schedule, self._records)
        self.out.records = [self._records[row.id] for row in self.schedule.rows]
        self.out.preemptions = sum(r.preemptions for r in self.replicas.values())
        self.out.adapter_loads = sum(r.adapter_loads for r in self.replicas.values())
        self.out.queue_max = {r.id: r.queue_max for r in self.replicas.values()}
        check(self.flights, self.cores, self.replicas, self.held)
