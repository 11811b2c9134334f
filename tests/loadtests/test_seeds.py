"""Random numbers that are the same everywhere: literal values, published properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.seeds import Stream, Zipf, exp, log, mix, name_id


def test_the_numbers_are_pinned() -> None:
    stream = Stream(42, "a name")
    assert [stream.bits() for _ in range(2)] == PINNED_BITS
    assert mix(1, 2, 3) == PINNED_MIX
    assert name_id("chat") == PINNED_NAME


PINNED_BITS = [3374026726785916994, 8308267301111151758]
PINNED_MIX = 8457334684515183916
PINNED_NAME = 17634133714637075500


def test_names_separate_streams_and_order_of_use_does_not_matter() -> None:
    first = Stream(1, "arrivals").bits()
    other = Stream(1, "lengths")
    other.bits()
    assert Stream(1, "arrivals").bits() == first
    assert Stream(1, "lengths").bits() != first


@given(st.floats(1e-300, 1e300))
def test_own_logarithm_is_the_logarithm(x: float) -> None:
    assert log(x) == pytest.approx(math.log(x), rel=1e-14, abs=1e-15)


@given(st.floats(-600, 600))
def test_own_exponential_is_the_exponential(x: float) -> None:
    assert exp(x) == pytest.approx(math.exp(x), rel=1e-13)


def test_moments_are_those_of_the_laws() -> None:
    stream = Stream(7, "moments")
    n = 20_000
    assert sum(stream.exponential(3.0) for _ in range(n)) / n == pytest.approx(3.0, rel=0.03)
    normal = [stream.normal() for _ in range(n)]
    assert sum(normal) / n == pytest.approx(0.0, abs=0.03)
    assert sum(x * x for x in normal) / n == pytest.approx(1.0, rel=0.04)
    assert sum(stream.gamma(0.5, 2.0) for _ in range(n)) / n == pytest.approx(1.0, rel=0.05)
    assert sum(stream.weibull(2.0, 1.0) for _ in range(n)) / n == pytest.approx(math.gamma(1.5), rel=0.03)


def test_lognormal_has_the_quantiles_it_was_given() -> None:
    stream = Stream(9, "lengths")
    values = sorted(stream.lognormal(100.0, 400.0) for _ in range(20_000))
    assert values[10_000] == pytest.approx(100.0, rel=0.04)
    assert values[18_000] == pytest.approx(400.0, rel=0.06)


def test_poisson_on_a_window_has_the_count_of_its_rate() -> None:
    counts = [len(Stream(seed, "p").poisson_times(2.0, 100.0)) for seed in range(200)]
    mean = sum(counts) / len(counts)
    variance = sum((c - mean) ** 2 for c in counts) / len(counts)
    assert mean == pytest.approx(200.0, rel=0.03)
    assert variance / mean == pytest.approx(1.0, abs=0.25)  # rescaling to a fixed count would give 0


def test_zipf_prefers_low_ranks_in_proportion() -> None:
    zipf, stream = Zipf(100, 1.0), Stream(3, "zipf")
    drawn = [zipf.draw(stream) for _ in range(20_000)]
    assert drawn.count(0) / drawn.count(1) == pytest.approx(2.0, rel=0.1)
    assert 0 <= min(drawn) <= max(drawn) < 100
