"""Room in the KV cache, as projected from scrapes and from what was sent since."""

from __future__ import annotations

from policies.kv import KVHeadroom
from policies.model import Scraped
from policies.settings import Settings

S = Settings()  # 0.92 for interactive work, 0.80 for batch


def scrape(at: float, usage: float, preemptions: float = 0.0) -> Scraped:
    return Scraped("a", at, kv_usage=usage, num_gpu_blocks=1000, block_size=16, preemptions=preemptions)


def fits(kv: KVHeadroom, tokens: float, reserved: float, now: float, *, batch: bool = False) -> bool:
    return kv.fits(tokens, reserved, now, S, batch=batch)


def test_unknown_capacity_means_room() -> None:
    kv = KVHeadroom(None)
    assert fits(kv, 1e9, 1e9, 0.0)
    assert kv.free(0.0, 0.0) is None


def test_without_a_scrape_our_own_reservations_count() -> None:
    kv = KVHeadroom(16_000)
    assert fits(kv, 4_720, 10_000, 0.0)
    assert not fits(kv, 4_721, 10_000, 0.0)
    assert not fits(kv, 2_801, 10_000, 0.0, batch=True)
    assert kv.free(10_000, 0.0) == 6_000


def test_a_fresh_scrape_and_what_was_sent_since_replace_them() -> None:
    kv = KVHeadroom(None)
    kv.scraped(scrape(10.0, 0.5), 1_000, S)  # 8,000 held, 1,000 still to be generated
    assert kv.projected(99_999, 10.0) == 9_000
    kv.charge(2_000)
    assert kv.projected(99_999, 11.0) == 11_000
    assert kv.projected(12_345, 13.5) == 12_345  # too old to be believed


def test_a_preemption_lowers_the_ceiling_for_five_seconds() -> None:
    kv = KVHeadroom(None)
    kv.scraped(scrape(10.0, 0.5), 0, S)
    kv.scraped(scrape(11.0, 0.5, preemptions=3), 0, S)
    assert not fits(kv, 5_500, 0, 12.0)  # 13,500 of 16,000 is over 0.82
    kv.scraped(scrape(16.5, 0.5, preemptions=3), 0, S)
    assert fits(kv, 5_500, 0, 16.5)
