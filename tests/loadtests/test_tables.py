"""What is printed: paired differences with their claim, unknowns as dashes."""

from __future__ import annotations

from loadtests.tables import DASH, difference


def interval(low: float, high: float, n: int = 5) -> dict[str, object]:
    return {"goodput_rps": {"estimate": (low + high) / 2, "low": low, "high": high, "n": n}}


def test_a_difference_that_excludes_zero_has_a_star() -> None:
    assert difference(interval(0.25, 0.5)) == "+0.375 [+0.250, +0.500]*"
    assert difference(interval(-0.5, -0.25)) == "-0.375 [-0.500, -0.250]*"


def test_a_difference_that_does_not_has_none() -> None:
    assert difference(interval(-0.25, 0.5)) == "+0.125 [-0.250, +0.500]"


def test_one_seed_claims_nothing() -> None:
    assert difference(interval(1.0, 1.0, 1)) == "+1.000 (one seed)"
    assert difference({}) == DASH
