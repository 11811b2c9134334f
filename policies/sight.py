"""How the fleet looks to one request: refreshes the views that policies and admission read.

For each replica: backlog W (its own, the peers', and in late binding the work parked for it and the debt of its pace,
all as tokens of prefill), cached and uncached tokens of this request, preference rank, and predicted
TTFT = wait + overhead + seconds ahead + own seconds. Trade-off: views are reused objects, valid until the next look.
"""

from __future__ import annotations

from policies.affinity import Affinity, Look
from policies.fleet_state import Pool
from policies.settings import Settings
from policies.tracked import Tracked


class Sight:
    """Looks at a pool with the eyes of one request."""

    def __init__(self, affinity: Affinity, settings: Settings) -> None:
        self.affinity = affinity
        self.settings = settings
        self.last = Look([], [], affinity.homes.place((), None, 0.0))

    def look(self, pool: Pool, tracked: Tracked, now: float) -> None:
        """O(chain + replicas). `last` holds what the index said."""
        request = tracked.request
        prompt = float(request.prompt_tokens)
        look = self.last = self.affinity.look(request, now)
        known, tried, holds = look.cached_tokens, tracked.tried, self.settings.holds
        for replica in pool.replicas:
            view, ledger, fit = replica.view, replica.ledger, replica.prefill
            cached = known[replica.slot]
            uncached = prompt - cached
            service = replica.service_s = fit.seconds(uncached, cached)
            rate = fit.rate
            if ledger.prefilling:
                backlog, ahead = ledger.backlog(now), ledger.backlog_s(now)
            else:
                backlog = ahead = 0.0
            if replica.peers is not None:
                peers = replica.peers_tokens(now)
                backlog += peers
                ahead += peers / rate
            replica.engine_ttft_s = ttft = fit.overhead_s + ahead + service
            if holds:
                pace = replica.pace
                if ledger.live_decodes:
                    wait = pace.wait(now)
                    ttft += wait
                    backlog += wait * rate
                replica.ttft_s = ttft
                if replica.parked_s:
                    own = tracked.parked_s if tracked.preferred is replica else 0.0
                    parked = (replica.parked_s - own) / pace.rate
                    ttft += parked
                    backlog += parked * rate
            view.available = False
            view.in_flight, view.live_decodes, view.kv_tokens = ledger.in_flight, ledger.live_decodes, ledger.kv_tokens
            view.prefill_backlog_tokens = backlog
            view.cached_tokens = cached
            view.uncached_tokens = uncached
            view.prefill_rate = uncached / service if service > 0.0 else rate
            view.predicted_ttft_s = ttft
            if replica.scraped is not None:
                view.scraped_age_s = now - replica.scraped.at
            if replica.kv.capacity is not None:
                view.kv_free_tokens = replica.kv.free(ledger.kv_tokens, now)
        for replica in pool.open:
            replica.view.available = not tried or replica.id not in tried
        order = look.placement.order
        if order:
            replicas, homes, rank = pool.by_id, look.placement.homes, 0
            for name in order:
                found = replicas.get(name)
                if found is not None:
                    found.view.preference_rank, found.view.homes = rank, homes
                    rank += 1
