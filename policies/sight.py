"""How the fleet looks to one request: refreshes the views that policies and admission read.

For each replica: backlog W (its own, the peers', and in late binding the work parked for it, here or elsewhere, and the
debt of its pace, all as tokens of prefill), cached and uncached tokens of this request, preference rank, and predicted
TTFT = wait + overhead + seconds ahead + own seconds. Trade-off: views are reused objects, valid until the next look.
"""

from __future__ import annotations

from policies.affinity import Affinity, Look
from policies.fleet_state import Pool, Replica
from policies.settings import Settings
from policies.tracked import NEVER, Tracked


class Sight:
    """Looks at a pool with the eyes of one request."""

    def __init__(self, affinity: Affinity, settings: Settings) -> None:
        self.ask = affinity.look  # what is known of a request's prefix
        self.holds = settings.holds  # whether requests may wait in the core
        self.last: Look | None = None
        self._pool: Pool | None = None  # looked at last
        self._shown: Pool | None = None  # the pool whose replicas' views say who is up; None: some are hidden
        self._rank_last = self._rank
        # over the open replicas, for the request looked at last:
        self.best_service_s = self.best_start_s = 0.0  # its least prefill, without and with overhead
        self.best_uncached = 0.0  # tokens of that
        self.worst_ttft_s = 0.0  # its longest wait for a first token, without what is parked

    def look(self, pool: Pool, tracked: Tracked, now: float) -> None:
        """O(chain + replicas). `last` holds what the index said."""
        request = tracked.request
        prompt = float(request.prompt_tokens)
        self.show(pool, tracked)
        look = self.last = self.ask(request, now)
        self._pool = pool
        pool.view.rank_by(self._rank_last)
        known, holds = look.cached_tokens, self.holds
        best_service = best_start = NEVER
        best_uncached = 0.0
        worst = 0.0
        for replica, up in pool.beside:
            view, ledger, fit = replica.view, replica.ledger, replica.prefill
            cached = known[replica.slot]
            uncached = prompt - cached
            # PrefillFit.seconds, unrolled: this loop is the cost of a decision
            service = uncached * (fit.per_token_s + fit.per_context_s * (cached + 0.5 * uncached))
            start = fit.overhead_s + service
            replica.service_s = service
            rate = fit.rate
            if ledger.pending:
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
                if (pace.closed or pace.fixed) and replica.streams(now):
                    wait = pace.wait(now)
                    ttft += wait
                    backlog += wait * rate
                replica.ttft_s = ttft
                if up:
                    if service < best_service:
                        best_service, best_uncached = service, uncached
                    if start < best_start:
                        best_start = start
                    if ttft > worst:
                        worst = ttft
                parked = replica.parked_s
                if replica.peers is not None:
                    parked += replica.peers_parked_s(now)
                if parked:
                    own = tracked.parked_s if tracked.preferred is replica else 0.0
                    parked = (parked - own) / pace.rate
                    ttft += parked
                    backlog += parked * rate
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
            self.best_uncached = best_uncached
        else:
            self.best_service_s = self.best_start_s = self.best_uncached = 0.0

    def show(self, pool: Pool, tracked: Tracked) -> None:
        """Marks who may take the request: the open replicas it has not been tried on."""
        if pool is not self._shown:
            for replica, up in pool.beside:
                replica.view.available = up
            pool.view.show([r.view for r in pool.open])
            self._shown = pool
        if tracked.tried:
            self.hide(pool, [pool.by_id[name] for name in tracked.tried if name in pool.by_id])

    def hide(self, pool: Pool, replicas: list[Replica]) -> None:
        """For this request these are not available."""
        for replica in replicas:
            replica.view.available = False
        self._shown = None
        pool.view.show(None)

    def _rank(self) -> None:
        """Place on the preference list, and how many of it are homes, into the views."""
        assert self.last is not None
        assert self._pool is not None
        placement, replicas, rank = self.last.placement, self._pool.by_id, 0
        if placement.key is None:  # without an identity every replica is as good a home
            for replica in self._pool.replicas:
                replica.view.preference_rank, replica.view.homes = 0, 1
        for name in placement.order:
            found = replicas.get(name)
            if found is not None:
                view = found.view
                view.preference_rank, view.homes = rank, placement.homes
                rank += 1
