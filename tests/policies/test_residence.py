"""How long a prefix stays cached, from what fills the cache."""

from __future__ import annotations

import math

import pytest

from policies.model import Scraped
from policies.residence import Residence


def scrape(at: float, queries: float, hits: float, generated: float, used: float | None = None) -> Scraped:
    return Scraped("r0", at, None, None, used, prefix_queries=queries, prefix_hits=hits, generation_tokens=generated)


def test_a_cache_of_400k_tokens_that_takes_4k_a_second_keeps_what_nobody_uses_for_100_seconds() -> None:
    known = Residence()
    assert known.seconds(400_000.0) == math.inf
    for second in range(5):  # 8,000 tokens asked for a second, 5,000 found, 1,000 generated
        known.scraped(scrape(float(second), 8000.0 * second, 5000.0 * second, 1000.0 * second))
    assert known.fill_tokens_s == 4000.0
    assert known.seconds(400_000.0) == 100.0
    assert known.seconds(None) == math.inf


@pytest.mark.parametrize(("used", "stays_s"), [(0.25, 75.0), (0.75, 25.0), (1.0, 25.0)])
def test_what_live_requests_hold_is_no_room_for_what_nobody_uses(used: float, stays_s: float) -> None:
    """But for a quarter, since it is itself part of what is believed to be there."""
    known = Residence()
    for second in range(5):
        known.scraped(scrape(float(second), 4000.0 * second, 0.0, 0.0, used=used))
    assert known.seconds(400_000.0) == stays_s


def test_a_restart_and_silence_say_nothing() -> None:
    known = Residence()
    known.scraped(scrape(0.0, 100_000.0, 0.0, 0.0))
    known.scraped(scrape(1.0, 0.0, 0.0, 0.0))
    known.scraped(Scraped("r0", 2.0))
    assert known.fill_tokens_s is None
    known.scraped(scrape(3.0, 0.0, 0.0, 0.0))
    assert known.seconds(1000.0) == math.inf, "nothing fills it"


def test_a_burst_is_forgotten_within_minutes() -> None:
    known = Residence()
    known.scraped(scrape(0.0, 0.0, 0.0, 0.0))
    known.scraped(scrape(1.0, 1000.0, 0.0, 0.0))
    known.scraped(scrape(31.0, 1000.0, 0.0, 0.0))
    assert known.fill_tokens_s is not None
    assert abs(known.fill_tokens_s - 1000.0 / math.e) < 1e-6
