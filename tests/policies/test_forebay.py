"""forebay's score by hand: seconds of delay caused, and when a home is kept."""

from __future__ import annotations

from typing import Any

import pytest

from policies import make
from policies.adapters import AdapterSlots, AdapterState
from policies.model import Completed, Dispatched, FleetView, Outcome, Removed, Scraped
from tests.policies.views import ask, chosen, dispatch, fleet, replica


def warm(**fields: Any) -> dict[str, Any]:
    """8000 tokens/s; predicted TTFT is what the core would say: (W + u) / R."""
    values = {"uncached_tokens": 1000.0, "prefill_backlog_tokens": 0.0, "prefill_rate": 8000.0, **fields}
    values.setdefault(
        "predicted_ttft_s", (values["prefill_backlog_tokens"] + values["uncached_tokens"]) / values["prefill_rate"]
    )
    return values


def delay(view: dict[str, Any], **request: Any) -> float:
    choice = make("forebay").choose(ask(**request), FleetView([replica("a", **view)]), 0.0)
    assert choice.reason == "only_one"
    return choice.scores[0][1]


def test_own_wait_plus_harm_to_those_in_flight_and_to_one_not_yet_seen() -> None:
    # T 0.125 s; kappa 1: another 0.125 s
    assert delay(warm()) == pytest.approx(0.250)
    # queue of 4000 tokens: 0.5 s; three in flight wait 0.125 s each
    assert delay(warm(prefill_backlog_tokens=4000.0, in_flight=3)) == pytest.approx(0.5 + 0.25 + 3 * 0.125)


def test_kv_costs_nothing_until_it_overflows_and_then_four_times_over() -> None:
    room = warm(kv_free_tokens=11_500.0, kv_capacity_tokens=100_000.0)
    # 1000 + 500 of 11500 leave more than the reserve of 8000
    assert delay(room, expected_tokens=500) == pytest.approx(0.250)
    tight = warm(kv_free_tokens=7_500.0, kv_capacity_tokens=100_000.0)
    # 2000 tokens over: 4 x 2000 / 8000
    assert delay(tight, expected_tokens=500) == pytest.approx(0.250 + 1.0)


def test_the_worked_case_where_the_product_leaves_a_warm_replica_too_early() -> None:
    warm_one = warm(prefill_backlog_tokens=1500.0, uncached_tokens=1000.0, cached_tokens=9000.0, in_flight=5)
    cold_one = warm(uncached_tokens=10_000.0, in_flight=1)
    assert chosen(make("forebay"), ask(prompt_tokens=10_000), fleet(a=warm_one, b=cold_one)) == "a"
    buried = warm(prefill_backlog_tokens=40_000.0, uncached_tokens=500.0, cached_tokens=9500.0, in_flight=30)
    assert chosen(make("forebay"), ask(prompt_tokens=10_000), fleet(a=buried, b=warm(uncached_tokens=10_000.0))) == "b"


@pytest.mark.parametrize(
    ("backlog", "wanted", "reason"),
    [
        (0.0, "a", "affinity"),  # home 0.25 s against 0.5 s
        (2100.0, "a", "affinity"),  # 0.5125 s: leaving saves 0.0125 s, the prefill there takes 0.25 s
        (2300.0, "b", "spill"),  # 0.5375 s: leaving saves 0.0375 s
    ],
)
def test_a_home_is_left_only_if_that_saves_a_tenth_of_the_prefill_it_costs(
    backlog: float, wanted: str, reason: str
) -> None:
    home = warm(uncached_tokens=1000.0, cached_tokens=1000.0, prefill_backlog_tokens=backlog)
    choice = make("forebay").choose(ask(prompt_tokens=2000), fleet(a=home, b=warm(uncached_tokens=2000.0)), 0.0)
    assert (choice.replica_id, choice.reason) == (wanted, reason)


def test_a_cold_prompt_goes_to_the_first_of_its_list_and_to_the_cheapest_of_its_homes() -> None:
    ranks = {"a": 2, "b": 0, "c": 1}
    one_home = fleet(**{n: warm(preference_rank=r) for n, r in ranks.items()})
    assert make("forebay").choose(ask(), one_home, 0.0).reason == "cold"
    assert chosen(make("forebay"), ask(), one_home) == "b"
    two_homes = {n: warm(preference_rank=r, homes=2) for n, r in ranks.items()}
    two_homes["b"] = warm(preference_rank=0, homes=2, prefill_backlog_tokens=200.0)  # 10 % more than c
    assert chosen(make("forebay"), ask(), fleet(**two_homes)) == "c"


def test_a_hash_home_is_a_tie_break_and_no_reason_to_wait() -> None:
    """Many in flight make every delay large; a share of it would hide a queue of half a second."""
    busy = {"in_flight": 60, "uncached_tokens": 500.0}
    view = fleet(a=warm(**busy, prefill_backlog_tokens=2500.0, preference_rank=0), b=warm(**busy, preference_rank=1))
    assert chosen(make("forebay"), ask(), view) == "b"


def test_equal_holders_are_told_apart_by_rank() -> None:
    policy, second = make("forebay"), warm(cached_tokens=500.0, preference_rank=1)
    first = warm(cached_tokens=500.0, preference_rank=0)
    assert chosen(policy, ask(), fleet(a=second, b=first)) == "b"
    busier = first | {"prefill_backlog_tokens": 100.0, "predicted_ttft_s": 0.1375}  # a tenth of its prefill: no tie
    assert chosen(policy, ask(), fleet(a=second, b=busier)) == "a"


def test_decode_replicas_get_no_new_prompts_unless_nobody_else_is_left() -> None:
    roles = fleet(a=warm(role="decode"), b=warm(role="prefill", in_flight=50))
    assert chosen(make("forebay"), ask(), roles) == "b"
    assert chosen(make("forebay"), ask(), fleet(a=warm(role="decode"), b=warm(available=False))) == "a"


def test_an_adapter_is_worth_its_load_time_and_a_busy_set_of_slots_a_wait() -> None:
    policy = make("forebay")
    view = fleet(a=warm(), b=warm(), c=warm())
    for name in "abc":
        policy.observe(Scraped(name, max_adapters=1), 0.0)
    assert dispatch(policy, ask(id="1", adapter="x"), view).replica_id == "a"
    scores = dict(policy.choose(ask(adapter="x"), view, 0.0).scores)
    assert scores == {"a": pytest.approx(0.25), "b": pytest.approx(4.25), "c": pytest.approx(4.25)}
    crowd = dict(policy.choose(ask(adapter="x"), fleet(a=warm(), b=warm(in_flight=3), c=warm()), 0.0).scores)
    alone = dict(policy.choose(ask(), fleet(a=warm(), b=warm(in_flight=3), c=warm()), 0.0).scores)
    assert crowd["b"] - alone["b"] == pytest.approx(10.0)  # two seconds for it, for three others and one to come
    scores = dict(policy.choose(ask(adapter="y"), view, 0.0).scores)
    assert scores["a"] == pytest.approx(8.25)  # the only slot holds x, which has a request open
    policy.observe(Completed(ask(id="1", adapter="x"), "a", Outcome.SUCCESS, None, 1.0), 0.0)
    assert dict(policy.choose(ask(adapter="y"), view, 0.0).scores)["a"] == pytest.approx(4.25)


def test_adapter_slots_keep_the_recently_used_and_drop_an_idle_one_for_a_new() -> None:
    slots = AdapterSlots()
    slots.observe(Scraped("a", max_adapters=2, adapters_running=("x",)))
    slots.observe(Dispatched(ask(adapter="y"), "a"))
    assert [slots.state("a", name) for name in "xyz"] == [AdapterState.LOADED, AdapterState.LOADED, AdapterState.ROOM]
    slots.observe(Dispatched(ask(adapter="z"), "a"))  # x is idle as far as we know: it goes
    assert [slots.state("a", name) for name in "xyz"] == [AdapterState.FULL, AdapterState.LOADED, AdapterState.LOADED]
    slots.observe(Removed("a"))
    assert slots.state("a", "y") is AdapterState.ROOM


def test_each_signal_can_be_switched_off_to_measure_it() -> None:
    busy = fleet(a=warm(cached_tokens=500.0, uncached_tokens=500.0, in_flight=90), b=warm())
    assert chosen(make("forebay"), ask(), busy) == "b"
    assert chosen(make("forebay", {"load": False}), ask(), busy) == "a"
    full = fleet(
        a=warm(cached_tokens=500.0, uncached_tokens=500.0, kv_free_tokens=0.0, kv_capacity_tokens=1e5), b=warm()
    )
    assert chosen(make("forebay"), ask(), full) == "b"
    assert chosen(make("forebay", {"kv": False}), ask(), full) == "a"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kapa": 1}, "policy 'forebay' has no parameter 'kapa'; accepted: adapter_load_s"),
        ({"kappa": -1}, "policy 'forebay': parameter 'kappa' is -1; it must be from 0.0 to 64.0"),
        ({"kappa": "much"}, "policy 'forebay': parameter 'kappa' is 'much'; it must be a number"),
        ({"load": 1}, "policy 'forebay': parameter 'load' is 1; it must be true or false"),
        ({"kv_price": float("nan")}, "it must be at least 0.0"),
    ],
)
def test_wrong_settings_say_what_would_be_right(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="policy") as caught:
        make("forebay", settings)
    assert message in str(caught.value)
