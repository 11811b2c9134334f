"""forebay: the replica where the request causes the least delay, its own wait plus the harm to others, in seconds.

J_i = T_i + (n_i + kappa) u_i / R + KV_i + adapter_i
  T_i      predicted time to first token there: queue W_i, own uncached tokens u_i, at its own rate
  harm     the n_i requests in flight wait for u_i / R (R: mean rate), and so does one not yet seen (kappa): without it
           siblings of a burst are each prefilled elsewhere, since waiting for the first costs each as much as a copy
  KV_i     tokens beyond the free ones less a reserve are computed again after a preemption, for everybody: steep and
           only on the overflow (the asymmetry of BalanceRoute, arXiv 2605.06113)
  adapter  a load, which holds up everybody there, or a load and a wait, where the adapter is not on the GPU
Home: the cheapest holder of the longest match, else the cheapest home on the prefix's list (on the session's, where
there is no prefix). A holder is left only if that saves a tenth of the prefill to be done elsewhere, a mere home for a
fiftieth: per request and per pair, never by a fleet-wide gate. Ties go by rank on the list, so that several gateways
agree. Sources: marginal delay joins least work (LPWL) and LMetric's product (arXiv 2603.15202).
Trade-off: a linear harm term counts in-flight requests with and without slack alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from policies.adapters import AdapterSlots, AdapterState
from policies.model import Choice, FleetView, PolicyEvent, ReplicaView, Request
from policies.parameters import parameter
from policies.policy import NONE_AVAILABLE


@dataclass(frozen=True)
class ForebayParameters:
    kappa: float = parameter(1.0, 0.0, 64.0, "arrivals not yet seen that wait for this prefill, requests")
    kv_reserve: float = parameter(0.08, 0.0, 0.9, "share of KV kept free")
    kv_price: float = parameter(4.0, 0.0, None, "times an overflowing KV token is computed again")
    hysteresis: float = parameter(0.10, 0.0, 1.0, "share of the prefill elsewhere that must be saved to leave a holder")
    tie: float = parameter(0.02, 0.0, 1.0, "share of the prefill within which two delays count as equal")
    adapter_load_s: float = parameter(2.0, 0.0, None, "price of loading an adapter: its time, and its slot's, seconds")
    adapter_wait_s: float = parameter(4.0, 0.0, None, "wait for a slot when all hold running adapters, seconds")
    homes: bool = parameter(True, about="use preference lists (off only to measure what they are worth)")
    load: bool = parameter(True, about="use the active load (off only to measure what it is worth)")
    kv: bool = parameter(True, about="use the KV headroom (off only to measure what it is worth)")


class Forebay:
    name: ClassVar[str] = "forebay"
    adapters_only: ClassVar[bool] = True

    def __init__(self, parameters: ForebayParameters, rng: Random) -> None:
        self._p = parameters
        self._adapters = AdapterSlots()

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        replicas = fleet.prefillers()
        if not replicas:
            return NONE_AVAILABLE
        delays = self._delays_s(request, replicas)
        scores = tuple([(r.id, delay) for r, delay in zip(replicas, delays, strict=True)])
        if len(replicas) == 1:
            return Choice(replicas[0].id, "only_one", scores)
        best = min(delays)
        cheapest = replicas[delays.index(best)]
        prefill_s = cheapest.uncached_tokens / cheapest.prefill_rate
        tie = self._p.tie * prefill_s
        longest = max([r.cached_tokens for r in replicas])
        if longest > 0.0:
            homes, slack, stays, leaves = self._holders(replicas, longest), self._p.hysteresis, "affinity", "spill"
        else:
            homes, slack, stays, leaves = self._homes(fleet, replicas), self._p.tie, "cold", "load"
        home = self._least(fleet, replicas, delays, homes, tie)
        if delays[home] <= best + slack * prefill_s:
            return Choice(replicas[home].id, stays, scores)
        at = self._least(fleet, replicas, delays, range(len(replicas)), tie)
        return Choice(replicas[at].id, leaves, scores)

    def _delays_s(self, request: Request, replicas: Sequence[ReplicaView]) -> list[float]:
        """J of each replica, seconds."""
        p = self._p
        output = request.expected_tokens
        kappa, reserve, price = p.kappa, p.kv_reserve, p.kv_price if p.kv else 0.0
        # one rate for what others wait: times n, the noise of each replica's own fit would outweigh its queue
        common = len(replicas) / sum([r.prefill_rate for r in replicas], 0.0)
        delays = []
        for r in replicas:
            uncached, free, capacity = r.uncached_tokens, r.kv_free_tokens, r.kv_capacity_tokens
            if p.load:
                delay = r.predicted_ttft_s + (r.in_flight + kappa) * uncached * common
            else:
                delay = (1.0 + kappa) * uncached * common
            if free is not None and capacity is not None:
                overflow = uncached + output - free + reserve * capacity
                if overflow > 0.0:
                    delay += price * overflow * common
            delays.append(delay)
        if request.adapter is not None:
            for i, r in enumerate(replicas):
                delays[i] += self._adapter_s(r.id, request.adapter, r.in_flight)
        return delays

    def _adapter_s(self, replica_id: str, adapter: str, in_flight: int) -> float:
        """A load holds up the step of everybody there."""
        match self._adapters.state(replica_id, adapter):
            case AdapterState.LOADED:
                return 0.0
            case AdapterState.ROOM:
                return self._p.adapter_load_s * (1.0 + in_flight + self._p.kappa)
            case AdapterState.FULL:
                return self._p.adapter_load_s * (1.0 + in_flight + self._p.kappa) + self._p.adapter_wait_s

    def _holders(self, replicas: Sequence[ReplicaView], longest: float) -> Sequence[int]:
        """Who holds the longest match, or nearly so."""
        enough = longest * (1.0 - self._p.tie)
        return [i for i, r in enumerate(replicas) if r.cached_tokens >= enough]

    def _homes(self, fleet: FleetView, replicas: Sequence[ReplicaView]) -> Sequence[int]:
        """Who is a home of the prefix, or else the first on its list that is there."""
        if not self._p.homes:
            return range(len(replicas))
        fleet.rank()
        first = min([r.preference_rank for r in replicas])
        return [i for i, r in enumerate(replicas) if r.preference_rank <= first or r.preference_rank < r.homes]

    def _least(
        self,
        fleet: FleetView,
        replicas: Sequence[ReplicaView],
        delays: Sequence[float],
        among: Sequence[int],
        tie_s: float,
    ) -> int:
        """Of several the one with the least delay. Those nearly as good as it are tied: then the first on the list is
        taken, else the least delay after all."""
        if len(among) == 1:
            return among[0]
        bound = min([delays[i] for i in among]) + tie_s
        tied = [i for i in among if delays[i] <= bound]
        best = tied[0]
        if len(tied) == 1:
            return best
        if not self._p.homes:
            return min(tied, key=delays.__getitem__)
        fleet.rank()
        rank = replicas[best].preference_rank
        for i in tied:
            other = replicas[i].preference_rank
            if other < rank or (other == rank and delays[i] < delays[best]):
                best, rank = i, other
        return best

    def observe(self, event: PolicyEvent, now: float) -> None:
        self._adapters.observe(event)
