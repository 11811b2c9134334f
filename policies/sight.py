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
        # over the open replicas, for the request looked at last:
        self.best_service_s = self.best_start_s = 0.0  # its least prefill, without and with overhead
        self.worst_ttft_s = 0.0  # its longest wait for a first token, without what is parked

    def look(self, pool: Pool, tracked: Tracked, now: float) -> None:
        """O(chain + replicas). `last` holds what the index said."""
        request = tracked.request
        prompt = float(request.prompt_tokens)
        look = self.last = self.affinity.look(request, now)
        known, tried, holds = look.cached_tokens, tracked.tried, self.settings.holds
        best_service = best_start = float("inf")
        worst = 0.0
        for replica, up in zip(pool.replicas, pool.up, strict=True):
            view, ledger, fit = replica.view, replica.ledger, replica.prefill
            cached = known[replica.slot]
            uncached = prompt - cached
            # PrefillFit.seconds, unrolled: this loop is the cost of a decision
            service = uncached * (fit.per_token_s + fit.per_context_s * (cached + 0.5 * uncached))
            start = fit.overhead_s + service
            replica.service_s = service
            rate = fit.rate
            if ledger.prefilling:
                backlog, ahead = ledger.both(now)
            else:
                backlog = ahead = 0.0
            if replica.peers is not None:
                peers = replica.peers_tokens(now)
                backlog += peers
                ahead += peers / rate
            replica.engine_ttft_s = ttft = start + ahead
            if holds:
                pace = replica.pace
                if pace.may_wait and ledger.live_decodes:
                    wait = pace.wait(now)
                    ttft += wait
                    backlog += wait * rate
                replica.ttft_s = ttft
                if up:
                    if service < best_service:
                        best_service = service
                    if start < best_start:
                        best_start = start
                    if ttft > worst:
                        worst = ttft
                if replica.parked_s:
                    own = tracked.parked_s if tracked.preferred is replica else 0.0
                    parked = (replica.parked_s - own) / pace.rate
                    ttft += parked
                    backlog += parked * rate
            view.available = up
            view.prefill_backlog_tokens = backlog
            view.cached_tokens = cached
            view.uncached_tokens = uncached
            view.prefill_rate = uncached / service if service > 0.0 else rate
            view.predicted_ttft_s = ttft
            if replica.scraped is not None:
                view.scraped_age_s = now - replica.scraped.at
        self.worst_ttft_s = worst
        if pool.open:
            self.best_service_s, self.best_start_s = best_service, best_start
        else:
            self.best_service_s = self.best_start_s = 0.0
        for name in tried:
            known_replica = pool.by_id.get(name)
            if known_replica is not None:
                known_replica.view.available = False
        order = look.placement.order
        if order:
            replicas, homes, rank = pool.by_id, look.placement.homes, 0
            for name in order:
                found = replicas.get(name)
                if found is not None:
                    view = found.view
                    view.preference_rank, view.homes = rank, homes
                    rank += 1
