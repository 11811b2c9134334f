"""Gateways of one fleet ask one price: what each tells the others, and what those make of it."""

from __future__ import annotations

import random

import pytest

from policies.admission import SizeFairness
from policies.prices import Prices
from policies.told import Told


class Gateway:
    def __init__(self) -> None:
        self.fairness = SizeFairness(float("inf"))
        self.prices = Prices(self.fairness)
        self.price = self.prices.of("llama")
        self.told = Told(self.prices, self.fairness)

    def arrives(self, now: float, cost: float, tenant: str | None = None) -> None:
        self.fairness.arrived(1000)
        self.told.asked(now, "llama", 1000, cost, tenant)
        self.price.too_dear(1000, cost, tenant, now)

    def hears(self, other: Gateway, now: float) -> None:
        self.told.heard("other", other.told.said({"llama": 1.5}), now)


def pair() -> tuple[Gateway, Gateway]:
    """Two that have met."""
    a, b = Gateway(), Gateway()
    a.hears(b, 0.0)
    b.hears(a, 0.0)
    return a, b


def test_both_ask_the_price_that_one_would_ask() -> None:
    (a, b), alone = pair(), Gateway()
    rng = random.Random(3)
    for n in range(600):  # twenty a second, each to one of the two at random
        now, cost = n / 20, rng.expovariate(1.0)
        rng.choice((a, b)).arrives(now, cost)
        alone.arrives(now, cost)
        if n % 2 == 1:
            a.hears(b, now)
            b.hears(a, now)
    for one in (a, b, alone):
        one.price.set(10.0, 30.0)
    assert a.price.thresholds[0] == pytest.approx(alone.price.thresholds[0], rel=0.02)
    assert b.price.thresholds[0] == pytest.approx(alone.price.thresholds[0], rel=0.02)
    assert a.price.demand(30.0) + b.price.demand(30.0) == pytest.approx(alone.price.demand(30.0), rel=0.02)


def test_what_is_told_twice_counts_once_and_what_was_before_they_met_does_not() -> None:
    a, b = Gateway(), Gateway()
    b.told.said({})
    b.arrives(0.0, 5.0)
    a.hears(b, 0.1)
    assert sum(a.fairness.offered) == 0.0
    b.arrives(0.2, 5.0)
    for _ in range(3):
        a.hears(b, 0.3)
    assert sum(a.fairness.offered) == 1.0
    b.told.refused(0.4, "llama", 1000, priced=False, late=False)
    for _ in range(3):
        a.hears(b, 0.5)
    assert sum(a.fairness.shed) == sum(a.fairness.unpriced) == 1.0


def test_a_late_refusal_anywhere_lowers_the_capacity_that_all_count_on() -> None:
    a, b = pair()
    for n in range(10):
        b.price.refused_late()
        b.told.refused(n / 10, "llama", 1000, priced=False, late=True)
        a.hears(b, n / 10)
    assert a.price.factor == pytest.approx(b.price.factor)
    for _ in range(1000):
        b.price.dispatched()
        b.told.dispatched("llama")
    a.hears(b, 2.0)
    assert a.price.factor == b.price.factor == 1.1


def test_who_was_held_for_long_anywhere_shows_all_that_there_is_too_much_to_do() -> None:
    a, b = pair()
    assert not a.price.strained(0.0, 10.0, 0.0)
    b.told.dispatched("llama")
    a.hears(b, 1.0)
    assert not a.price.strained(0.0, 10.0, 1.0)
    b.told.dispatched("llama", held_long=True)
    a.hears(b, 2.0)
    a.hears(b, 6.0)  # the same again
    assert a.price.strained(0.0, 10.0, 7.0)
    assert not a.price.strained(0.0, 10.0, 7.1)
    b.told.refused(8.0, "llama", 1000, priced=False, late=True)
    a.hears(b, 8.0)
    assert a.price.strained(0.0, 10.0, 8.0)


def test_of_one_that_does_not_tell_it_a_dispatch_may_have_been_held_for_long() -> None:
    """A gateway of an older version beside this one, while they are replaced one by one."""
    a, b = pair()
    for dispatched in (1, 2):
        b.told.dispatched("llama")
        said = b.told.said({})
        del said["long"]
        a.told.heard("other", said, float(dispatched))
    assert a.price.factor == pytest.approx(0.85 * 1.0006**2)
    assert a.price.strained(0.0, 10.0, 2.0)


def test_of_a_thousand_arrivals_a_second_a_part_is_told_and_all_are_counted() -> None:
    a, b = pair()
    for n in range(1000):
        b.arrives(n / 1000, 0.01)
        if n % 100 == 99:
            assert len(b.told.said({})["asked"][1]) <= 64
            a.hears(b, n / 1000)
    a.price.set(1e9, 1.0)
    assert a.price._asked[0] == pytest.approx(10.0, rel=0.1)


def test_who_starts_anew_is_heard_anew_and_who_is_gone_is_forgotten() -> None:
    a, b = pair()
    b.arrives(0.1, 5.0)
    a.hears(b, 0.2)
    again = Gateway()
    a.hears(again, 0.3)
    again.arrives(0.4, 5.0)
    a.hears(again, 0.5)
    assert sum(a.fairness.offered) == pytest.approx(2.0, rel=0.01)
    assert (a.told.waiting("llama"), a.told.waiting("qwen")) == (1.5, 0.0)
    a.told.forget(set())
    assert a.told.waiting_s == {}


def test_one_that_nobody_asks_keeps_nothing() -> None:
    alone = Gateway()
    alone.arrives(0.0, 1.0)
    assert alone.told.said({})["asked"] == (1, [])
