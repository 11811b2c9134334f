"""Baselines that remember prefixes, against their sources by hand."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from policies import make
from policies.model import Removed
from policies.remembered import Remembered
from policies.text_tree import TextTree
from tests.policies.views import ask, chosen, finished, fleet, sent, text

SHARED = "The quick brown fox jumps over the lazy dog. " * 20  # 900 characters


def test_the_tree_names_the_latest_tenant_of_the_deepest_match() -> None:
    tree = TextTree()
    tree.insert("abcdef", "x")
    tree.insert("abcxyz", "y")
    assert tree.match("abcdef!") == (6, frozenset({"x"}), "x")
    assert tree.match("abc") == (3, frozenset({"x", "y"}), "y")
    assert tree.match("abcx--") == (4, frozenset({"y"}), "y")
    assert tree.match("zzz") == (0, frozenset(), None)
    assert (tree.owned("x"), tree.owned("y")) == (6, 6)
    tree.remove("y")
    assert tree.match("abcxyz") == (3, frozenset({"x"}), "x")
    assert tree.owned("x") == 6


def test_the_tree_evicts_a_tenants_least_recent_leaves() -> None:
    tree = TextTree()
    tree.insert("aaaa1111", "x")
    tree.insert("aaaa2222", "x")
    tree.insert("aaaa1111", "x")  # used again
    tree.evict(9)
    assert tree.match("aaaa2222") == (4, frozenset({"x"}), "x")
    assert tree.match("aaaa1111")[0] == 8


def test_the_tree_takes_chunk_keys_where_there_is_no_text() -> None:
    tree = TextTree()
    tree.insert((1, 2, 3), "x")
    assert tree.match((1, 2, 9)) == (2, frozenset({"x"}), "x")
    assert tree.owned("x") == 3 * 256


def test_cache_aware_follows_the_tree_above_its_threshold_and_load_below() -> None:
    policy = make("cache_aware")
    sent(policy, text(SHARED), "b")
    busy_b = fleet(a=0, b=40)  # 40 apart: under abs 64, so the holder keeps everything
    assert chosen(policy, text(SHARED + "x" * 100), busy_b) == "b"
    assert chosen(policy, text(SHARED[:30] + "x" * 71), busy_b) == "a"  # 30 of 101 characters: not above 0.3
    assert chosen(policy, text(SHARED[:31] + "x" * 69), busy_b) == "b"  # 31 of 100


def test_cache_aware_gates_the_whole_fleet_on_the_spread() -> None:
    policy = make("cache_aware")
    sent(policy, text(SHARED), "b")
    assert chosen(policy, text(SHARED), fleet(a=66, b=1, c=0)) == "c"  # 66 > 64 and 66 > 1.5 x 0, though b is idle
    assert chosen(policy, text(SHARED), fleet(a=195, b=131, c=130)) == "b"  # 65 > 64, but 195 is not > 1.5 x 130
    library = make("cache_aware_library")
    sent(library, text(SHARED), "b")
    assert chosen(library, text(SHARED), fleet(a=195, b=131, c=130)) == "c"  # 65 > 32 and 195 > 1.1 x 130


def test_cache_aware_sends_a_dead_holders_prompts_to_the_first_replica() -> None:
    policy = make("cache_aware")
    sent(policy, text(SHARED), "c")
    assert chosen(policy, text(SHARED), fleet(a=5, b=0, c={"available": False})) == "a"
    policy.observe(Removed("c"), 0.0)
    assert chosen(policy, text(SHARED), fleet(a=5, b=0)) == "b"


def test_ray_prefix_takes_the_shortest_queue_among_the_longest_match() -> None:
    policy = make("ray_prefix", rng=Random(1))
    sent(policy, text(SHARED), "b")
    sent(policy, text(SHARED), "c")
    assert chosen(policy, text(SHARED + "more"), fleet(a=0, b=7, c=6)) == "c"
    # 5 of 100 characters match, under 10 %: the replica with the fewest characters
    assert chosen(policy, text(SHARED[:5] + "#" * 95), fleet(a=9, b=0, c=0)) == "a"


def test_ray_prefix_with_the_documented_threshold_falls_back_to_two_choices() -> None:
    policy = make("ray_prefix", {"imbalanced_threshold": 10}, Random(1))
    sent(policy, text(SHARED), "b")
    draws = Counter(chosen(policy, text(SHARED), fleet(a=0, b=11, c=5)) for _ in range(300))
    assert draws["b"] == 0


def test_prefix_trie_is_random_among_the_deepest_and_over_all_on_a_miss() -> None:
    policy = make("prefix_trie", rng=Random(1))
    sent(policy, text("a" * 128 + "b" * 128), "a")
    sent(policy, text("a" * 128 + "b" * 128), "b")
    sent(policy, text("a" * 128 + "c" * 128), "c")
    view = fleet(a=99, b=99, c=0, d=0)
    assert {chosen(policy, text("a" * 128 + "b" * 200), view) for _ in range(60)} == {"a", "b"}
    assert {chosen(policy, text("a" * 200), view) for _ in range(60)} == {"a", "b", "c"}
    assert {chosen(policy, text("z" * 200), view) for _ in range(60)} == {"a", "b", "c", "d"}


def test_loadaware_weighs_the_matched_share_against_relative_load() -> None:
    policy = make("loadaware")
    request = ask(chain=(1, 2, 3, 4))
    sent(policy, ask(chain=(1, 2)), "a")
    # a: 0.5 - (4 - 2) / 2 = -0.5; b: 0 - (0 - 2) / 2 = 1
    assert policy.choose(request, fleet(a=4, b=0), 0.0).scores == (("a", 0.5), ("b", -1.0))
    assert chosen(policy, request, fleet(a=2, b=2)) == "a"
    assert chosen(make("loadaware", {"beta": 0.0}), request, fleet(a=4, b=0)) == "a"


def test_aibrix_prefix_by_hand() -> None:
    policy = make("aibrix_prefix", rng=Random(1))
    sent(policy, ask(chain=(1, 2, 3, 4)), "a")
    sent(policy, ask(chain=(1, 2)), "b")
    request = ask(chain=(1, 2, 3, 4))
    assert chosen(policy, request, fleet(a=4, b=4, c=3)) == "a"  # mean 3.67, deviation 0.47: limit 4.14
    assert chosen(policy, request, fleet(a=6, b=3, c=3)) == "b"  # mean 4, deviation 1.41: 6 > 5.41
    assert chosen(policy, request, fleet(a=9, b=4, c=0)) == "c"  # 9 > 8 apart: the gate
    assert chosen(policy, ask(chain=(9,)), fleet(a=4, b=4, c=3)) == "c"
    assert chosen(policy, request, fleet(a=4, b=4, c=3), now=1300.0) == "c"  # older than 20 minutes


def test_weighted_is_llm_ds_two_two_three() -> None:
    policy = make("weighted")
    sent(policy, ask(chain=(1, 2, 3, 4)), "a")
    view = fleet(
        a={"scraped": {"waiting": 4, "kv_usage": 0.5}},
        b={"scraped": {"waiting": 0, "kv_usage": 0.1}},
        c={"scraped": {"waiting": 2, "kv_usage": 0.0}},
    )
    scores = dict(policy.choose(ask(chain=(1, 2, 3, 4)), view, 0.0).scores)
    # a: 2 x 0 + 2 x 0.5 + 3 x 1; b: 2 x 1 + 2 x 0.9; c: 2 x 0.5 + 2 x 1
    assert scores == {"a": -4.0, "b": pytest.approx(-3.8), "c": -3.0}
    assert chosen(policy, ask(chain=(1, 2, 3, 4)), view) == "a"
    ones = make("weighted_111")
    sent(ones, ask(chain=(1, 2, 3, 4)), "a")
    assert chosen(ones, ask(chain=(1, 2, 3, 4)), view) == "b"  # 1.5 against 1.9


def test_weighted_without_reports_goes_by_prefix() -> None:
    policy = make("weighted")
    sent(policy, ask(chain=(1,)), "b")
    assert chosen(policy, ask(chain=(1,)), fleet(a=0, b=9)) == "b"


def test_sticky_until_saturated_breaks_at_eighteen_seconds() -> None:
    policy = make("sticky_until_saturated")
    request = ask(chain=(1, 2, 3, 4, 5), prompt_tokens=320)
    sent(policy, ask(chain=(1, 2, 3, 4)), "a")  # 80 %

    def at(backlog: float) -> str | None:
        return chosen(policy, request, fleet(a={"prefill_backlog_tokens": backlog}, b={}))

    assert at(18 * 15_928.0) == "a"
    assert at(18 * 15_928.0 + 100) == "b"
    sent(policy, ask(chain=(7, 8, 9)), "b")
    assert chosen(policy, ask(chain=(7, 8, 9, 10)), fleet(a={}, b={"prefill_backlog_tokens": 800.0})) == "a"  # 75 %


def test_dynamo_cost_in_blocks() -> None:
    policy = make("dynamo_cost")
    sent(policy, ask(chain=(1, 2, 3, 4)), "a")
    view = fleet(
        a={"prefill_backlog_tokens": 640.0, "kv_tokens": 6400.0}, b={"prefill_backlog_tokens": 0.0, "kv_tokens": 3200.0}
    )
    request = ask(chain=(1, 2, 3, 4), prompt_tokens=256)
    # a: (640 + 256) / 64 - 4 + 100 = 110; b: 4 - 0 + 50
    assert policy.choose(request, view, 0.0).scores == (("a", 110.0), ("b", 54.0))
    assert policy.choose(request, view, 121.0).scores == (("a", 114.0), ("b", 54.0))  # forgotten after 120 s


def test_preble_exploits_a_match_longer_than_the_rest() -> None:
    policy = make("preble")
    view = fleet(
        a={"cached_tokens": 501.0, "uncached_tokens": 499.0, "in_flight": 9, "predicted_tpot_s": 0.1},
        b={"cached_tokens": 0.0, "uncached_tokens": 1000.0, "predicted_tpot_s": 0.1},
    )
    assert chosen(policy, ask(), view) == "a"
    view.replicas[0].cached_tokens = 499.0
    assert chosen(policy, ask(), view) == "b"  # explore: 9 x 45 x 0.1 s against nothing


def test_preble_counts_three_minutes_of_prefill_work() -> None:
    policy = make("preble")
    both = {"uncached_tokens": 8000.0, "prefill_rate": 8000.0, "predicted_tpot_s": 0.1}
    view = fleet(a=dict(both), b=dict(both))
    policy.choose(ask(), view, 0.0)
    sent(policy, ask(), "a", now=0.0)
    assert dict(policy.choose(ask(), view, 179.0).scores) == {"a": 1.0, "b": 0.0}
    assert dict(policy.choose(ask(), view, 181.0).scores) == {"a": 0.0, "b": 0.0}
    view.replicas[0].in_flight = 2
    finished(policy, ask(), "a", 182.0, tokens=30)  # median output is measured from now on
    assert dict(policy.choose(ask(), view, 183.0).scores)["a"] == pytest.approx(2 * 30 * 0.1)


def test_the_plain_memory_is_an_lru_with_an_age() -> None:
    it = Remembered(3, ttl_s=10.0)
    it.insert("a", (1, 2), 0.0)
    it.insert("a", (1, 3), 5.0)
    assert (it.matched("a", (1, 2), 5.0), it.matched("a", (1, 3), 5.0), it.matched("b", (1,), 5.0)) == (2, 2, 0)
    it.insert("a", (4,), 6.0)  # full: 2 is the oldest
    assert it.matched("a", (1, 2), 6.0) == 1
    assert it.matched("a", (1, 3), 15.5) == 0
