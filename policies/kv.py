"""Whether a replica has room in its KV cache for prompt plus expected answer.

vLLM preempts when blocks run out, and preemptions cascade: a cliff, not a slope. So the projection is what the last
scrape said plus what was dispatched since, or our own reservations where there is no fresh scrape; it must stay
under a limit below 1, lower for batch. A preemption seen in a scrape lowers both limits for some seconds.
Cached blocks that no live request holds count as free, as in vLLM's own gauge. Unknown capacity means room.
"""

from __future__ import annotations

from typing import Final

from policies.model import Scraped
from policies.settings import Settings

FRESH_S: Final = 3.0  # an older scrape is not used


class KVHeadroom:
    """One replica's KV tokens as this gateway projects them."""

    __slots__ = ("_at_scrape", "_charged", "_penalty_until", "_preemptions", "_scraped_at", "capacity")

    def __init__(self, capacity_tokens: float | None) -> None:
        self.capacity = capacity_tokens
        self._at_scrape = 0.0  # tokens held then
        self._scraped_at: float | None = None
        self._charged = 0.0  # uncached prompt and expected answer of everything dispatched since
        self._preemptions: float | None = None
        self._penalty_until = float("-inf")

    def scraped(self, event: Scraped, growth_tokens: float, settings: Settings) -> None:
        """growth_tokens: what the open requests may still generate."""
        if event.num_gpu_blocks and event.block_size:
            self.capacity = float(event.num_gpu_blocks * event.block_size)
        if event.kv_usage is not None and self.capacity is not None:
            self._at_scrape = event.kv_usage * self.capacity + growth_tokens
            self._scraped_at, self._charged = event.at, 0.0
        if event.preemptions is not None:
            if self._preemptions is not None and event.preemptions > self._preemptions:
                self._penalty_until = event.at + settings.kv_penalty_s
            self._preemptions = event.preemptions

    def charge(self, tokens: float) -> None:
        self._charged += tokens

    def restarted(self) -> None:
        self._scraped_at, self._charged, self._preemptions = None, 0.0, None

    def projected(self, reserved_tokens: float, now: float) -> float:
        """reserved_tokens: prompt and expected answer of our own open requests."""
        if self._scraped_at is None or now - self._scraped_at > FRESH_S:
            return reserved_tokens
        return self._at_scrape + self._charged

    def free(self, reserved_tokens: float, now: float) -> float | None:
        """Tokens; None when the capacity is unknown."""
        capacity = self.capacity
        if capacity is None:
            return None
        used = reserved_tokens if self._scraped_at is None else self.projected(reserved_tokens, now)
        return capacity - used if used < capacity else 0.0

    def penalised(self, now: float) -> bool:
        return now < self._penalty_until

    def fits(self, tokens: float, reserved_tokens: float, now: float, settings: Settings, *, batch: bool) -> bool:
        if self.capacity is None:
            return True
        limit = settings.kv_limit_batch if batch else settings.kv_limit
        if now < self._penalty_until:
            limit -= settings.kv_penalty
        return self.projected(reserved_tokens, now) + tokens <= limit * self.capacity
