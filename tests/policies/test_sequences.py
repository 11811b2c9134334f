"""Intervals that may be looked at any time: they hold the truth at all looks together, and cost a known width."""

from __future__ import annotations

import math
import random

import pytest

from policies.clusters import Contrast
from policies.sequences import anytime, half_width, once, planned_information


def test_the_planned_information_is_the_textbooks() -> None:
    # (1.96 + 0.8416)^2 / 0.02^2
    assert planned_information(0.02) == pytest.approx(19_622, rel=1e-3)


def test_at_the_planned_information_an_interval_is_a_known_factor_wide() -> None:
    planned = planned_information(0.02)
    assert half_width(planned**-0.5, planned) * planned**0.5 == pytest.approx(3.04, abs=0.01)
    early, late = half_width((planned / 20) ** -0.5, planned), half_width((planned * 20) ** -0.5, planned)
    assert early * (planned / 20) ** 0.5 > 3.04
    assert late * (planned * 20) ** 0.5 > 3.04


def test_looking_a_thousand_times_misses_the_truth_in_at_most_one_run_of_twenty() -> None:
    """A look-once interval read at every look would miss it in most runs."""
    planned, missed, fooled = 400.0, 0, 0
    for seed in range(400):
        rng = random.Random(seed)
        total = 0.0
        out = {"sequence": False, "once": False}
        for n in range(1, 1001):
            total += rng.gauss(0.0, 1.0)
            if n >= 10:
                se = n**-0.5
                out["sequence"] |= abs(total / n) > half_width(se, planned)
                out["once"] |= abs(total / n) > 1.96 * se
        missed += out["sequence"]
        fooled += out["once"]
    assert missed / 400 <= 0.05
    assert fooled / 400 > 0.3


def test_an_interval_reaches_further_where_more_rare_blocks_would_have_pulled_it() -> None:
    bounds = {
        skew: (round(found.low, 4), round(found.high, 4))
        for skew in (0.0, 0.05, 0.3, -0.3)
        if (found := anytime(Contrast(0.1, 0.02, 30, skew=skew), 2500.0)) is not None
    }
    assert bounds == {
        0.0: (0.0333, 0.1667),
        0.05: (0.0333, 0.1667),  # less than symmetric ones show by chance
        0.3: (0.0333, 0.1986),
        -0.3: (0.0014, 0.1667),
    }


def test_a_heavy_tail_is_covered_though_most_runs_have_not_seen_it() -> None:
    """Thirty blocks of a lognormal distribution, the truth of which is in its few largest."""
    truth, covered = math.exp(0.5 * 1.5**2), {"symmetric": 0, "skewed": 0}
    for seed in range(400):
        rng = random.Random(seed)
        blocks = [rng.lognormvariate(0.0, 1.5) for _ in range(30)]
        mean = math.fsum(blocks) / 30
        rest = [(x - mean) / 30 for x in blocks]
        square = math.fsum(e * e for e in rest)
        skew = math.fsum(e**3 for e in rest) / square**1.5
        for name, taken in (("symmetric", 0.0), ("skewed", skew)):
            found = anytime(Contrast(mean, math.sqrt(square * 30 / 29), 30, skew=taken), 0.3)
            assert found is not None
            covered[name] += found.low <= truth <= found.high
    assert covered == {"symmetric": 365, "skewed": 395}


def test_few_units_widen_an_interval_and_fewer_give_none() -> None:
    wide, narrow = (anytime(Contrast(0.1, 0.02, n), 2500.0) for n in (10, 1000))
    assert wide is not None
    assert narrow is not None
    assert wide.high - wide.low > 1.3 * (narrow.high - narrow.low)
    assert anytime(Contrast(0.1, 0.02, 9), 2500.0) is None
    assert anytime(None, 2500.0) is None
    assert once(Contrast(0.1, 0.02, 9)) is None


def test_no_spread_at_all_is_no_certainty() -> None:
    found = anytime(Contrast(0.0, 0.0, 50), 2500.0)
    assert found is not None
    assert found.low < -0.03
    assert math.isinf(half_width(0.0, 2500.0))
