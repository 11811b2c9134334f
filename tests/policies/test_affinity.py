"""Cached tokens as expected per replica, corrected by what the engine reports."""

from __future__ import annotations

from policies.affinity import Affinity
from policies.feedback import BytesPerToken, Precision
from policies.model import Request, Usage


def request(n: int = 1, chunks: int = 8, **more: object) -> Request:
    keys = tuple(n * 1000 + i for i in range(chunks))
    values = {"prompt_bytes": chunks * 256, "prompt_tokens": chunks * 64, "chain": keys, **more}
    return Request(f"r{n}", **values)  # type: ignore[arg-type]


def fleet(capacity_tokens: float | None = None) -> Affinity:
    made = Affinity()
    made.add("a", kv_capacity_tokens=capacity_tokens)
    made.add("b", kv_capacity_tokens=capacity_tokens)
    return made


def test_a_dispatch_makes_its_replica_the_warm_one_before_the_engine_confirms() -> None:
    it, first = fleet(), request()
    look = it.look(first, 0.0)
    assert look.cached_tokens == [0.0, 0.0]
    it.dispatched(first, "a", look, "cold", 0.1, 0.0)
    # the last token is always computed: 511 of 512, at the initial precision of 0.9
    assert [round(t, 6) for t in it.look(request(), 0.0).cached_tokens] == [459.9, 0.0]


def test_the_next_turn_matches_prompt_and_answer() -> None:
    it, first = fleet(), request()
    it.dispatched(first, "a", it.look(first, 0.0), "cold", 0.1, 0.0)
    it.ended(first, "a", Usage(512, 128, 0), prefilled=True, now=0.5)  # 128 tokens: two chunks
    turn = Request("n", prompt_bytes=3072, prompt_tokens=768, chain=(*first.chain, 21, 22, 23, 24))
    assert it.look(turn, 1.0).claimed_tokens == [640.0, 0.0]


def test_a_failed_attempt_leaves_nothing_behind() -> None:
    it, first = fleet(), request()
    it.dispatched(first, "a", it.look(first, 0.0), "cold", 0.1, 0.0)
    it.ended(first, "a", None, prefilled=False, now=0.5)
    assert it.look(request(), 0.0).claimed_tokens == [0.0, 0.0]


def test_where_others_fill_the_cache_too_only_what_was_used_lately_is_believed_in() -> None:
    it, first, other = fleet(), request(1), request(2)
    it.dispatched(first, "a", it.look(first, 0.0), "cold", 0.1, 0.0)
    it.dispatched(other, "a", it.look(other, 0.0), "cold", 0.1, 0.0)
    it.ended(first, "a", Usage(512, 128, 0), prefilled=True, now=10.0)
    it.stays("a", seconds=30.0, now=35.0)
    assert it.look(request(1), 35.0).claimed_tokens == [511.0, 0.0], "used until it ended"
    assert it.look(request(2), 35.0).claimed_tokens == [0.0, 0.0]


def test_a_restart_empties_one_replica() -> None:
    it, first = fleet(), request()
    for name in ("a", "b"):
        it.dispatched(first, name, it.look(first, 0.0), "cold", 0.1, 0.0)
    it.restarted("a")
    assert it.look(request(), 0.0).claimed_tokens == [0.0, 511.0]


def test_what_other_gateways_saw_counts_too() -> None:
    it = fleet()
    seen = request(shared_depth={"b": 4, "unknown": 8})
    assert it.look(seen, 0.0).claimed_tokens == [0.0, 256.0]


def test_of_a_prompt_that_is_longer_than_its_chain_all_that_others_saw_counts() -> None:
    """Its chain ends after 512 chunks; a follow-up of 800 that another gateway took was known for 512 of them."""
    it = fleet()
    whole = request(chain=tuple(range(512)), prompt_bytes=800 * 256, prompt_tokens=51_200, shared_depth={"b": 780})
    assert it.look(whole, 0.0).claimed_tokens == [0.0, 49_920.0]
    whole.shared_depth = {"b": 900}
    assert it.look(whole, 0.0).claimed_tokens == [0.0, 51_199.0]


def test_capacity_is_the_engines_in_tokens_and_shrinks_when_hits_fail_to_come() -> None:
    it = fleet(capacity_tokens=64 * 1000)
    assert it.index.capacity("a") == 1000
    first = request()
    it.dispatched(first, "a", it.look(first, 0.0), "cold", 0.1, 0.0)
    for _ in range(120):
        it.dispatched(first, "a", it.look(first, 0.0), "affinity", 0.1, 0.0)
        it.ended(first, "a", Usage(512, 0, 100), prefilled=True, now=0.0)
    assert it.precision("a") < 0.4
    assert it.index.capacity("a") == 900
    assert it.index.capacity("b") == 1000


def test_bytes_per_token_are_learnt_per_model() -> None:
    it = BytesPerToken(4.0)
    for _ in range(200):
        it.observe("code", 3000, 1000)
        it.observe("prose", 5000, 1000)
    assert (round(it.ratio("code"), 3), round(it.ratio("prose"), 3), it.ratio("other")) == (3.0, 5.0, 4.0)
    assert it.tokens_per_chunk("code") == 256 / it.ratio("code")
    it.observe("code", 10, 3)  # too short to say anything
    assert round(it.ratio("code"), 3) == 3.0


def test_precision_follows_reports_and_asks_for_less_capacity_only_when_it_lasts() -> None:
    it = Precision()
    assert it.value == 0.9
    assert it.observe(0.0, 50.0) == 1.0  # nothing was claimed, nothing is learnt
    factors = [it.observe(1000.0, 500.0) for _ in range(200)]
    assert round(it.value, 2) == 0.51
    assert factors.count(0.9) == 2  # 57 samples until it is below 0.7, then every 50
    factors = [it.observe(1000.0, 1000.0) for _ in range(300)]
    assert it.value > 0.95
    assert factors.count(1.02) == 3
