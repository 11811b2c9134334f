"""Several workers in virtual time: hands carry the requests, and everything they and the core say takes a while.

As in the product: a hand asks the core about each request and tells it of first tokens, ends and failures; the core
answers with decisions; each way keeps its order (one socket a hand, what is said together arrives together). A pulse
reaches the core one tick later, the longest that two clocks of 50 ms can make of it. A client's deadline counts from
when a hand received it. An order to take a request back that crosses its first token is refused as hands refuse it.
Delays are drawn per message: half of the median at least, then straight to the median, to the p99, to twice that.
Left out: for up to 5 ms a hand may count the gap of a stream as idle that the core calls busy.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from loadtests.scenario import Scenario
from loadtests.schedule import Schedule
from loadtests.seeds import mix, name_id
from loadtests.simreplica import Flight
from loadtests.virtual import CALL, Simulation, Told
from policies.core import Balancer
from policies.model import Abort, Decision, Dispatch, Outcome, Pulse

TICK_S = 0.05


class Handed(Simulation):
    """A run whose gateways have `scenario.hands` workers each."""

    def __init__(self, schedule: Schedule, scenario: Scenario, cores: Sequence[Balancer], seed: int = 0) -> None:
        super().__init__(schedule, scenario, cores, seed)
        self._rng = random.Random(mix(seed, name_id("hands")))
        self._last: defaultdict[tuple[int, int, bool], float] = defaultdict(float)  # arrival of what was said last
        self._over = False

    def told(self, flight: Flight, what: Told, now: float) -> list[Decision]:
        def heard(at: float) -> None:
            decisions = what(self.cores[flight.gateway], at)
            self.decide(flight.gateway, decisions, at)

        self.push(self._arrival(flight, True, now), CALL, heard)
        return []

    def decide(self, gateway: int, decisions: Iterable[Decision], now: float) -> None:
        for decision in decisions:
            flight = self.flights.get(decision.request_id)
            if flight is not None:  # its client left, and the core will hear of that
                self.push(self._arrival(flight, False, now), CALL, partial(self._ordered, flight, decision))
        self._arm(gateway)

    def pulsed(self, gateway: int, replica_id: str, pulse: Pulse, now: float) -> None:
        self.push(now + TICK_S, CALL, lambda at: super(Handed, self).pulsed(gateway, replica_id, pulse, at))

    def _ordered(self, flight: Flight, decision: Decision, now: float) -> None:
        """A decision of the core has reached its hand."""
        if flight.over or (isinstance(decision, Dispatch) and flight.replica is not None):
            return
        if isinstance(decision, Abort) and decision.requeue and flight.first_at is not None:
            self._keep(flight, now)
            return
        self.carry_out(flight, decision, now)

    def _keep(self, flight: Flight, now: float) -> None:
        """It has begun to answer: it stays where it is, and the core charges it again."""
        replica, request = flight.replica, flight.request
        assert replica is not None

        def kept(core: Balancer, at: float) -> list[Decision]:
            before = core.complete(request.id, Outcome.CANCELLED, None, at)
            return [*before, *core.adopt(request, replica.id, at, True, at)]

        self.told(flight, kept, now)

    def _arrival(self, flight: Flight, up: bool, now: float) -> float:
        """When what is said now is heard at the other end; never before what was said earlier."""
        hand = mix(self.seed, flight.row.id, name_id("hand")) % self.scenario.hands
        key = (flight.gateway, hand, up)
        at = self._last[key] = max(self._last[key], now + self._delay_s())
        return at

    def _delay_s(self) -> float:
        median, p99 = self.scenario.hand_delay_s
        drawn = self._rng.random()
        if self._over:
            return 0.0
        if drawn < 0.5:
            return median * (0.5 + drawn)
        if drawn < 0.99:
            return median + (p99 - median) * (drawn - 0.5) / 0.49
        return p99 * (1.0 + (drawn - 0.99) / 0.01)

    def _close(self) -> None:
        """What is on its way at the end arrives, so that hands and cores agree on what is open."""
        self._over = True
        calls = sorted(event for event in self._heap if event[2] == CALL)
        while calls:
            self._heap.clear()
            for _, _, _, what in calls:
                what(self.end_s)
            calls = sorted(event for event in self._heap if event[2] == CALL)
        super()._close()
