"""Rates and intervals with literal cases that can be checked by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import statistics as s


def test_percentiles_carry_their_population() -> None:
    p = s.percentiles([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (p.p50, p.p90, p.max, p.n) == (3.0, 4.6, 5.0, 5)


def test_percentiles_of_nothing_are_unknown_not_zero() -> None:
    p = s.percentiles([])
    assert (p.p50, p.p99, p.max, p.n) == (None, None, None, 0)


def test_failures_counted_as_infinite_raise_the_tail_and_not_the_middle() -> None:
    p = s.percentiles([1.0] * 95 + [s.INFINITE] * 5)
    assert p.p50 == 1.0
    assert p.p99 == math.inf


def test_one_straggler_does_not_change_goodput() -> None:
    # 90 good in W = 60 s and D = 30 s: one per second, whenever the last answer came
    assert s.goodput_rps(90, 60.0, 30.0) == 1.0


def test_goodput_and_attainment_agree() -> None:
    good, offered, window, drain = 480, 600, 500.0, 100.0
    share = s.attainment(good, offered)
    assert share == 0.8
    assert s.goodput_rps(good, window, drain) == pytest.approx(share * offered / (window + drain))


def test_attainment_of_an_empty_cohort_is_unknown() -> None:
    assert s.attainment(0, 0) is None


def test_a_window_of_zero_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="window 0"):
        s.goodput_rps(1, 0.0, 1.0)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(50, 100, 0.4038, 0.5962), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (950, 1000, 0.9347, 0.9619)],
)
def test_wilson_matches_published_values(successes: int, n: int, low: float, high: float) -> None:
    interval = s.wilson(successes, n)
    assert interval.low == pytest.approx(low, abs=1e-4)
    assert interval.high == pytest.approx(high, abs=1e-4)


def test_wilson_of_no_trials_knows_nothing() -> None:
    assert (s.wilson(0, 0).low, s.wilson(0, 0).high) == (0.0, 1.0)


def test_bootstrap_of_two_blocks_enumerates_its_three_means() -> None:
    # means 0, 0.5, 1 with weights 1/4, 1/2, 1/4: the 95 % interval is the whole range
    interval = s.bootstrap_mean([0.0, 1.0])
    assert (interval.estimate, interval.low, interval.high, interval.n) == (0.5, 0.0, 1.0, 2)


def test_one_block_supports_no_claim() -> None:
    result = s.paired([1.0], [2.0])
    assert not result.difference.excludes_zero
    assert result.difference.low == -math.inf


def test_pairing_by_seed_finds_a_difference_that_the_spread_would_hide() -> None:
    a = [1.0, 5.0, 9.0, 3.0, 7.0]
    b = [1.2, 5.1, 9.3, 3.2, 7.2]
    result = s.paired(a, b)
    assert result.difference.estimate == pytest.approx(0.2)
    assert result.difference.excludes_zero
    assert result.student.excludes_zero


def test_equal_arms_cover_zero() -> None:
    result = s.paired([1.0, 2.0, 3.0, 4.0, 5.0], [1.1, 1.9, 3.2, 3.8, 5.0])
    assert not result.difference.excludes_zero
    assert s.noise_floor([1.0, 2.0], [1.1, 1.7]) == pytest.approx(0.3)


def test_ratio_is_geometric_and_missing_when_an_arm_had_nothing_good() -> None:
    doubled = s.paired([1.0, 2.0, 4.0], [2.0, 4.0, 8.0]).ratio
    assert doubled is not None
    assert doubled[0] == pytest.approx(2.0)
    assert s.paired([0.0, 1.0], [1.0, 1.0]).ratio is None


def test_unpaired_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks against 1"):
        s.paired([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("degrees", "expected"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (5, 2.5706), (30, 2.0423)])
def test_student_quantiles_match_tables(degrees: int, expected: float) -> None:
    assert s.student_quantile(0.975, degrees) == pytest.approx(expected, abs=1e-4)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6))
def test_bootstrap_bounds_hold_the_estimate_and_stay_in_range(values: list[float]) -> None:
    interval = s.bootstrap_mean(values)
    assert min(values) - 1e-6 <= interval.low <= interval.estimate + 1e-6
    assert interval.estimate - 1e-6 <= interval.high <= max(values) + 1e-6


@settings(max_examples=10)  # each draws 20,000 resamples
@given(st.lists(st.floats(-1e3, 1e3), min_size=9, max_size=12))
def test_the_same_blocks_give_the_same_interval(values: list[float]) -> None:
    assert s.bootstrap_mean(values) == s.bootstrap_mean(values)
