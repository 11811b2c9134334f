"""Baselines that look at load only, against their sources by hand."""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Any

import pytest

from policies import make
from policies.model import Completed, FleetView, Outcome, Removed
from tests.policies.views import answered, ask, chosen, fleet, replica, sent


def test_round_robin_takes_each_available_replica_in_turn() -> None:
    policy = make("round_robin")
    view = fleet(a={}, b={"available": False}, c={})
    assert [chosen(policy, ask(), view) for _ in range(4)] == ["a", "c", "a", "c"]


def test_random_is_uniform_over_the_available() -> None:
    policy = make("random", rng=Random(3))
    view = fleet(a={}, b={"available": False}, c={}, d={})
    counts = Counter(chosen(policy, ask(), view) for _ in range(3000))
    assert counts["b"] == 0
    assert all(900 < counts[name] < 1100 for name in "acd")


def test_least_request_takes_the_fewest_in_flight_and_draws_among_equals() -> None:
    policy = make("least_request", rng=Random(1))
    assert chosen(policy, ask(), fleet(a=3, b=1, c=2)) == "b"
    draws = Counter(chosen(policy, ask(), fleet(a=3, b=1, c=1)) for _ in range(400))
    assert set(draws) == {"b", "c"}
    assert min(draws.values()) > 150


def test_power_of_two_never_takes_the_busiest_of_three_but_misses_the_best_a_third_of_the_time() -> None:
    policy = make("power_of_two", rng=Random(1))
    draws = Counter(chosen(policy, ask(), fleet(a=1, b=2, c=3)) for _ in range(3000))
    assert draws["c"] == 0
    assert 0.63 < draws["a"] / 3000 < 0.70  # pairs ab and ac of ab, ac, bc


def test_peak_ewma_jumps_to_a_peak_at_once_and_forgets_it_with_tau() -> None:
    policy = make("peak_ewma", {"tau_s": 10.0})
    answered(policy, "a", 4.0, now=0.0)
    answered(policy, "b", 1.0, now=0.0)
    view = fleet(a=0, b=3)
    assert policy.choose(ask(), view, 0.0).scores == (("a", 4.0), ("b", 4.0))  # 4 s x 1 = 1 s x 4
    answered(policy, "a", 2.0, now=10.0)  # below the peak: 4 e^-1 + 2 (1 - e^-1)
    (_, a), (_, b) = policy.choose(ask(), view, 10.0).scores
    assert a == pytest.approx(4 / math.e + 2 * (1 - 1 / math.e))
    assert b == pytest.approx(4 / math.e)


def test_peak_ewma_does_not_take_a_fast_error_for_a_fast_replica() -> None:
    policy = make("peak_ewma")
    answered(policy, "a", 2.0, now=0.0)
    policy.observe(Completed(ask(), "b", Outcome.ERROR, None, 0.001), 0.0)
    assert chosen(policy, ask(), fleet(a=0, b=0)) == "b"  # unknown: 1 s, which the error did not lower
    answered(policy, "b", 3.0, now=0.0)
    policy.observe(Completed(ask(), "b", Outcome.ERROR, None, 0.001), 0.0)
    assert chosen(policy, ask(), fleet(a=0, b=0)) == "a"
    policy.observe(Removed("b"), 0.0)
    assert dict(policy.choose(ask(), fleet(a=0, b=0), 0.0).scores)["b"] == 1.0


work_cases: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # least_work: backlog + own uncached; the lab notes' case: 1500 + 1000 < 0 + 10000
    ("least_work", {"prefill_backlog_tokens": 1500.0, "uncached_tokens": 1000.0, "in_flight": 5},
     {"uncached_tokens": 10_000.0, "in_flight": 1}, "a"),
    # equal work: fewer in flight
    ("least_work", {"uncached_tokens": 500.0, "in_flight": 5}, {"uncached_tokens": 500.0, "in_flight": 1}, "b"),
    # lmetric multiplies: 2500 x 6 = 15000 < 10000 x 2 = 20000 with plus one
    ("lmetric", {"prefill_backlog_tokens": 1500.0, "uncached_tokens": 1000.0, "in_flight": 5},
     {"uncached_tokens": 10_000.0, "in_flight": 1}, "a"),
    ("lmetric", {"prefill_backlog_tokens": 3000.0, "uncached_tokens": 1000.0, "in_flight": 5},
     {"uncached_tokens": 10_000.0, "in_flight": 1}, "b"),
    # most free KV; equal: fewest in flight; unknown is as good as the best
    ("kv_headroom", {"kv_free_tokens": 5000.0}, {"kv_free_tokens": 9000.0, "in_flight": 9}, "b"),
    ("kv_headroom", {"kv_free_tokens": 9000.0, "in_flight": 2}, {"in_flight": 1}, "b"),
    # most cached whatever the load
    ("prefix_only", {"cached_tokens": 300.0, "in_flight": 99}, {"cached_tokens": 200.0}, "a"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "a", "b", "wanted"), work_cases)
def test_one_signal_rules_by_hand(name: str, a: dict[str, Any], b: dict[str, Any], wanted: str) -> None:
    assert chosen(make(name), ask(), FleetView([replica("a", **a), replica("b", **b)])) == wanted


def test_lmetric_as_printed_has_an_empty_batch_hole() -> None:
    view = fleet(
        a={"uncached_tokens": 10.0, "in_flight": 1},
        b={"prefill_backlog_tokens": 50_000.0, "uncached_tokens": 9000.0},
    )
    assert chosen(make("lmetric", {"plus_one": False}), ask(), view) == "b"  # 59000 x 0 = 0
    assert chosen(make("lmetric"), ask(), view) == "a"


def test_least_work_takes_turns_among_equals() -> None:
    policy = make("least_work")
    assert {chosen(policy, ask(), fleet(a=0, b=0, c=0)) for _ in range(3)} == {"a", "b", "c"}


def test_vllm_dp_counts_its_own_picks_until_the_next_report() -> None:
    policy = make("vllm_dp")
    view = fleet(
        a={"scraped": {"at": 1.0, "running": 9, "waiting": 0}}, b={"scraped": {"at": 1.0, "running": 2, "waiting": 1}}
    )
    assert policy.choose(ask(), view, 1.0).scores == (("a", 9.0), ("b", 6.0))  # 4 x waiting + running
    sent(policy, ask(), "b")
    assert policy.choose(ask(), view, 1.0).scores == (("a", 9.0), ("b", 10.0))
    again = fleet(a={"scraped": {"at": 1.0, "running": 9}}, b={"scraped": {"at": 2.0, "running": 3, "waiting": 1}})
    assert policy.choose(ask(), again, 2.0).scores == (("a", 9.0), ("b", 7.0))
