"""What may be refused under overload, and who is protected from bearing it alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission import SizeFairness, StickyRefusals
from policies.price import ALIKE, Price


def offer(price: Price, seconds: float, per_s: float, capacity: float, seed: int = 1) -> list[tuple[int, float, bool]]:
    """Prompts of 1, 2, 4 and 16 thousand tokens in equal parts, 0.1 s per thousand: 0.575 s each on average."""
    rng, out = random.Random(seed), []
    for n in range(int(seconds * per_s)):
        tokens = rng.choice([1000, 2000, 4000, 16000]) + rng.randint(0, 9)
        price.fairness.arrived(tokens)
        if price.due(n / per_s):
            price.set(capacity, n / per_s)
        refused = price.too_dear(tokens, tokens / 10_000, None, n / per_s)
        if refused:
            price.fairness.refused(tokens)
        out.append((tokens, tokens / 10_000, refused))
    return out


def refused_share(rows: list[tuple[int, float, bool]], low: int, high: int) -> float:
    these = [refused for tokens, _, refused in rows if low <= tokens < high]
    return sum(these) / len(these)


def test_without_overload_there_is_no_price() -> None:
    price = Price(SizeFairness(2.0))
    assert not any(refused for _, _, refused in offer(price, 60, 4, capacity=4.0))
    assert not price.active


def test_nor_where_nobody_is_held_for_long_whatever_is_believed_of_speeds() -> None:
    price = Price(SizeFairness(2.0))
    offer(price, 40, 20, capacity=4.0)
    assert price.active
    assert not price.held(40.0, 50.0, 42.5)  # a quarter of the time it had
    price.set(4.0, 42.5, strained=price.strained(0.0, 10.0, 42.5))
    assert not price.active
    assert price.held(40.0, 50.0, 42.6)
    price.set(4.0, 47.6, strained=price.strained(0.0, 10.0, 47.6))
    assert price.active
    price.set(4.0, 47.7, strained=price.strained(0.0, 10.0, 47.7))
    assert not price.active
    assert not price.strained(2.5, 10.0, 47.7)  # what is held takes a quarter of the time
    assert price.strained(2.6, 10.0, 47.7)
    assert not price.strained(0.0, -1.0, 47.7), "who could not be in time anywhere shows nothing"


def test_under_overload_the_costly_are_refused_and_the_rest_fits() -> None:
    price = Price(SizeFairness(float("inf")))
    rows = offer(price, 120, 10, capacity=4.0)[300:]  # 5.75 s of work a second for 4
    served = sum(cost for _, cost, refused in rows if not refused) / 90
    assert 3.0 < served < 3.7  # 0.85 of it, until late refusals or their absence say otherwise
    assert refused_share(rows, 0, 10_000) == 0.0
    assert refused_share(rows, 10_000, 20_000) > 0.3


def test_the_bound_keeps_a_quartile_from_bearing_it_alone() -> None:
    unbounded = offer(Price(SizeFairness(float("inf"))), 200, 10, capacity=2.0)[300:]
    rows = offer(Price(SizeFairness(2.0)), 200, 10, capacity=2.0)[300:]
    average = refused_share(rows, 0, 20_000)
    assert refused_share(unbounded, 10_000, 20_000) > 2 * refused_share(unbounded, 0, 20_000)
    assert refused_share(rows, 10_000, 20_000) <= 2.05 * average or average > 0.4


def test_late_refusals_lower_the_capacity_and_dispatches_raise_it_again() -> None:
    price = Price(SizeFairness(2.0))
    for _ in range(10):
        price.refused_late()
    low = price.factor
    assert 0.69 < low < 0.70  # 0.85 x 0.98^10
    for _ in range(1000):
        price.dispatched()
    assert price.factor == 1.1


def test_while_a_price_is_asked_and_nobody_is_late_more_capacity_is_believed_than_without_one() -> None:
    """Ten per cent above the paces is what ease may teach; a price that makes nobody late was asked in error."""
    price = Price(SizeFairness(2.0))
    offer(price, 40, 20, capacity=4.0)
    assert price.active
    for _ in range(2000):
        price.dispatched()
    assert price.factor == 2.0
    price.set(4.0, 40 + 31)
    assert not price.active
    price.dispatched()
    assert price.factor == 2.0  # until somebody is late
    for _ in range(40):
        price.refused_late()
    assert 0.89 < price.factor < 0.9  # 2 x 0.98^40


def test_after_the_burst_the_price_is_gone() -> None:
    price = Price(SizeFairness(2.0))
    offer(price, 40, 20, capacity=4.0)
    assert price.active
    price.set(4.0, 40 + 31)
    assert not price.active


def test_the_price_goes_as_soon_as_what_waits_and_what_comes_fits() -> None:
    price = Price(SizeFairness(2.0))
    offer(price, 40, 20, capacity=4.0)
    price.set(4.0, 44.0, waiting_s=30.0)
    assert price.active  # little came in the last five seconds, but half a minute of work waits
    price.set(4.0, 44.0, waiting_s=0.0)
    assert not price.active


def test_one_prompt_of_half_a_minute_after_a_burst_does_not_bring_the_price_back() -> None:
    price = Price(SizeFairness(2.0))
    offer(price, 40, 20, capacity=4.0)
    price.too_dear(4000, 0.4, None, 48.0)
    price.too_dear(120_000, 30.0, None, 48.5)  # it fills one replica of four for its half minute, not all four
    price.set(4.0, 49.0, waiting_s=0.0)
    assert not price.active
    for n in range(7):  # seven of them are too much for four replicas
        price.too_dear(120_000, 30.0, None, 49.0 + n / 10)
    price.set(4.0, 50.0, waiting_s=0.0)
    assert price.active


def test_a_session_that_was_refused_stays_refused_for_a_while() -> None:
    sticky = StickyRefusals()
    sticky.refuse("s", 10.0)
    sticky.refuse(None, 10.0)
    assert sticky.refused("s", 9.9)
    assert not sticky.refused("s", 10.0)
    assert not sticky.refused("s", 9.9)  # forgotten with its end
    assert not sticky.refused(None, 1.0)


def test_tenants_within_their_fair_share_pay_no_price() -> None:
    price = Price(SizeFairness(2.0))
    for n in range(600):  # 20 requests a second of 1 s each for 4 s of capacity; one in ten is not the flood's
        at, tenant = n / 20, "modest" if n % 10 == 0 else "flood"
        price.fairness.arrived(10_000)
        if price.due(at):
            price.set(4.0, at)
        price.too_dear(10_000, 0.5 if tenant == "modest" else 1.0 + n % 7, tenant, at)
    assert price.exempt == {"modest"}
    assert not price.too_dear(10_000, 100.0, "modest", 30.0)
    assert price.too_dear(10_000, 100.0, "flood", 30.0)
    assert (price.floods("flood"), price.floods("modest")) == (True, False)


def test_when_every_tenant_is_within_its_share_nobody_pays() -> None:
    """Two tenants that ask for half of the fleet each: too much together after late refusals, too much by neither."""
    price = Price(SizeFairness(2.0))
    for _ in range(40):
        price.refused_late()
    for n in range(100):
        price.fairness.arrived(1000)
        assert not price.too_dear(1000, 0.4, "ab"[n % 2], n / 10)
    price.set(4.0, 10.0)
    assert price.exempt == {"a", "b"}
    assert not price.active


def test_what_the_queue_refused_late_counts_against_the_bound_of_its_quartile() -> None:
    fairness = SizeFairness(2.0)
    for n in range(400):
        fairness.arrived(1000 * (1 + n % 4))
    for _ in range(20):
        fairness.refused(4000)
    left_alone = SizeFairness(2.0).least_share(3, average=0.2, best=1.0)
    assert fairness.least_share(3, average=0.2, best=1.0) > left_alone + 0.05
    assert fairness.least_share(0, average=0.2, best=1.0) < left_alone  # others may bear more: the average rose


def test_after_a_refusal_the_excess_of_the_last_half_minute_is_what_clients_wait_for() -> None:
    price = Price(SizeFairness(2.0))
    offer(price, 30, 10, capacity=4.0)  # 5.75 s of work a second for 4
    price.set(4.0, 30.0)
    assert 15.0 < price.excess_s < 23.0  # 30 s x (5.75 - 3.4) / 3.4, and the luck of the draw
    price.set(4.0, 61.0)
    assert price.excess_s == 0.0


def test_the_aim_follows_what_the_worst_quartile_came_to() -> None:
    fairness = SizeFairness(2.0)
    for n in range(400):
        fairness.arrived(1000 * (1 + n % 4))
    for _ in range(20):
        fairness.refused(3000, priced=True)
        fairness.refused(4000, priced=True)
    began = fairness.aim
    fairness.steer()
    assert fairness.aim < began  # both at twice the average: the bound itself
    for _ in range(20):
        fairness.refused(1000, priced=True)
        fairness.refused(2000, priced=True)
    lowered = fairness.aim
    fairness.steer()
    assert fairness.aim > lowered  # all alike now


COSTS = st.lists(st.tuples(st.integers(1, 60_000), st.floats(0.01, 20.0)), min_size=40, max_size=200)


@given(COSTS, st.floats(0.05, 20.0), st.integers(0, 30))
def test_no_quartile_is_priced_out_beyond_the_bound(
    arrivals: list[tuple[int, float]], capacity: float, late: int
) -> None:
    """Whatever comes and whatever the queue refused: planned and late refusals of a quartile stay within twice the
    average (0.3 of the best share served, where most are refused), or it is served whole."""
    fairness = SizeFairness(2.0)
    price = Price(fairness)
    for n, (tokens, cost) in enumerate(arrivals):
        fairness.arrived(tokens)
        price.too_dear(tokens, cost, None, n / 10)
    for tokens, _ in arrivals[:late]:
        fairness.refused(tokens)
    price.set(capacity, len(arrivals) / 10)
    if not price.active:
        return
    rows = [(fairness.quartile(tokens), cost) for tokens, cost in arrivals]
    of = [sum(q == i for q, _ in rows) for i in range(4)]

    def refused(quartile: int, cost: float) -> float:
        """Which part of such requests: none well below the threshold, all well above it, a share of those about it."""
        threshold = price.thresholds[quartile]
        if cost * ALIKE <= threshold:
            return 0.0
        return 1.0 if cost > threshold * ALIKE else 1.0 - price._shares[quartile]

    out = [sum(refused(i, cost) for q, cost in rows if q == i) / max(of[i], 1) for i in range(4)]
    average = sum(o * n for o, n in zip(out, of, strict=True)) / len(rows)
    best = max(1.0 - o for o, n in zip(out, of, strict=True) if n)
    for i in range(4):
        least = fairness.least_share(i, average, best)
        assert not of[i] or 1.0 - out[i] >= min(1.0, least) - 2.0 / of[i]


def test_thousands_of_arrivals_are_judged_by_a_part_of_them_and_the_price_is_the_same() -> None:
    """Sorting all of a thousand requests a second would hold up a decision by 20 ms twice a second."""
    thresholds = []
    for rate in (50, 1000):  # a second; the fleet serves half of what both ask for
        price = Price(SizeFairness(float("inf")))
        rng = random.Random(7)
        now = 0.0
        for _ in range(30 * rate):
            now += 1.0 / rate
            price.fairness.arrived(1000)
            price.too_dear(1000, rng.expovariate(1.0) / rate, None, now)
        price.set(0.5 / price.factor, now)
        thresholds.append(price.thresholds[0] * rate)  # all are of the first quartile
    assert thresholds[0] == pytest.approx(1.68, rel=0.15)  # t of half the work: 1 - (1 + t) exp(-t) = 0.5
    assert thresholds[1] == pytest.approx(1.68, rel=0.15)


def test_of_prompts_that_are_all_alike_a_share_is_served_and_not_none() -> None:
    """A benchmark of prompts of one length: the cheapest are all of them, and all of them are too many."""
    price = Price(SizeFairness(2.0))
    refused = 0
    for n in range(2400):  # 20 of 0.4 s a second for 4 s of capacity, of which 0.85 are counted on
        now = n / 20
        price.fairness.arrived(1000)
        if price.due(now):
            price.set(4.0, now)
        refused += price.too_dear(1000, 0.4, None, now) and n >= 1200
    assert refused / 1200 == pytest.approx(1.0 - 0.85 * 4.0 / 8.0, abs=0.03)


def test_a_length_that_nobody_asked_for_lately_has_no_price() -> None:
    price = Price(SizeFairness(2.0))
    for n in range(400):
        price.fairness.arrived(1000)
        price.too_dear(1000, 0.4, None, n / 20)
    price.set(4.0, 20.0)
    assert price.active
    assert not price.too_dear(9000, 0.5, None, 20.0)
