"""How the fleet looks to one request: refreshes the views that policies and admission read.

For each replica: backlog W (its own, the peers', and in late binding the work parked for it and the debt of its pace,
all in tokens of prefill), cached and uncached tokens of this request, predicted TTFT = wait + a + (W + u) / R.
Cached tokens come from the prefix index, scaled by the replica's measured precision; one walk along the chain
answers for all replicas. Trade-off: views are reused objects, valid until the next look.
"""

from __future__ import annotations

from policies.feedback import CHUNK_BYTES, BytesPerToken
from policies.fleet_state import Pool, Replica
from policies.index import PrefixIndex
from policies.model import Request
from policies.settings import Settings
from policies.tracked import Tracked


class Sight:
    """Owns the prefix index and what it takes to turn depths into tokens."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.index = PrefixIndex()
        self.bytes_per_token = BytesPerToken(settings.prior_bytes_per_token)

    def look(self, pool: Pool, tracked: Tracked, now: float) -> None:
        request = tracked.request
        prompt = float(request.prompt_tokens)
        chain, shared = request.chain, request.shared_depth
        depths = self.index.depths(chain, request.prompt_bytes // CHUNK_BYTES) if chain else None
        per_chunk = self.tokens_per_chunk(request)
        holds, tried, most = self.settings.holds, tracked.tried, max(0.0, prompt - 1.0)
        for replica in pool.replicas:
            view, ledger, fit = replica.view, replica.ledger, replica.prefill
            rate = fit.rate
            backlog = ledger.backlog(now, rate) if ledger.prefilling else 0.0
            if replica.peers is not None:
                backlog += replica.peers_tokens(now)
            parked = 0.0
            if holds:
                pace = replica.pace
                if ledger.live_decodes:
                    backlog += pace.wait(now) * rate
                if replica.parked_s:
                    own = tracked.parked_s if tracked.preferred is replica else 0.0
                    parked = (replica.parked_s - own) / pace.rate
            cached = 0.0
            if depths is not None:
                depth = depths[replica.slot]
                if depth:
                    cached = depth * per_chunk * replica.precision.value
            if shared and (other := shared.get(replica.id, 0)):
                cached = max(cached, other * per_chunk * replica.precision.value)
            if cached > most:
                cached = most
            view.available = False
            view.in_flight, view.live_decodes, view.kv_tokens = ledger.in_flight, ledger.live_decodes, ledger.kv_tokens
            ttft = fit.overhead_s + (backlog + prompt - cached) / rate
            replica.ttft_s = ttft
            view.predicted_ttft_s = ttft + parked
            view.prefill_backlog_tokens = backlog + parked * rate
            view.cached_tokens = cached
            view.uncached_tokens = prompt - cached
            view.prefill_rate = rate
            if replica.scraped is not None:
                view.scraped_age_s = now - replica.scraped.at
            if view.kv_capacity_tokens is not None:
                view.kv_free_tokens = replica.kv.free(ledger.kv_tokens, now)
        for replica in pool.open:
            replica.view.available = not tried or replica.id not in tried

    def tokens_per_chunk(self, request: Request) -> float:
        """The request's own ratio where both of its sizes are known, else the model's learnt one."""
        if request.prompt_bytes:
            return CHUNK_BYTES * request.prompt_tokens / request.prompt_bytes
        return request.prompt_tokens / len(request.chain) if request.chain else 0.0

    def dispatched(self, request: Request, replica: Replica) -> None:
        """Siblings find each other before the engine confirms."""
        if request.chain:
            self.index.insert(replica.slot, request.chain)

    def finished(self, request: Request, replica: Replica, output_tokens: int) -> None:
        """The answer is cached too: the next turn matches prompt and answer."""
        if request.chain:
            per_chunk = self.tokens_per_chunk(request)
            beyond = max(0, request.prompt_bytes // CHUNK_BYTES - len(request.chain))
            self.index.insert(
                replica.slot, request.chain, beyond + (int(output_tokens / per_chunk) if per_chunk else 0)
            )

    def reported(self, replica: Replica, predicted_tokens: float, cached_tokens: int) -> None:
        """Usage told how much was cached: trust and capacity follow."""
        factor = replica.precision.observe(predicted_tokens, float(cached_tokens))
        if factor != 1.0:
            size = self.index.capacity(replica.id) or max(1, self.index.chunks(replica.id))
            self.index.resize(replica.id, max(1, int(size * factor)))

    def sized(self, replica: Replica, model: str) -> None:
        """The replica's KV capacity became known."""
        if replica.kv.capacity is not None and replica.view.kv_capacity_tokens != replica.kv.capacity:
            replica.view.kv_capacity_tokens = replica.kv.capacity
            self.index.resize(replica.id, self.bytes_per_token.chunks(model, replica.kv.capacity))
