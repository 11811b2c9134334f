"""What is counted by unit, and what differences say about it."""

from __future__ import annotations

import random
from statistics import fmean, pstdev

import pytest

from policies.clusters import ERRORS, GOOD, PACE, PACED, REQUESTS, Clusters, contrast, difference


def counted(rows: list[tuple[int, int, int, int]]) -> Clusters:
    """From (arm, cluster, requests, good)."""
    out = Clusters()
    for arm, cluster, requests, good in rows:
        for i in range(requests):
            out.add((arm, 0), cluster, i < good, i >= good, 0.5, 10.0)
    return out


def test_a_difference_of_rates_is_of_requests_and_its_error_is_of_clusters() -> None:
    table = counted([(0, 0, 10, 9), (0, 1, 10, 7), (0, 2, 20, 16), (1, 3, 10, 5), (1, 4, 10, 7), (1, 5, 20, 12)])
    found = contrast(table, difference(1), adjust=False)
    assert found is not None
    assert found.estimate == pytest.approx(24 / 40 - 32 / 40)
    assert found.clusters == 6
    # residuals over 40: control 1, -1, 0; arm -1, 1, 0
    assert found.se == pytest.approx((6 / 5 * 4 / 1600) ** 0.5)


def test_ten_equal_requests_of_a_session_say_no_more_than_one() -> None:
    rng = random.Random(5)
    rows = [(i % 2, i, 1, int(rng.random() < 0.8)) for i in range(400)]
    one = contrast(counted(rows), difference(1))
    ten = contrast(counted([(a, c, 10, 10 * g) for a, c, _, g in rows]), difference(1))
    assert one is not None
    assert ten is not None
    assert ten.se == pytest.approx(one.se)
    assert ten.estimate == pytest.approx(one.estimate)


def test_the_standard_error_is_the_spread_of_the_estimates() -> None:
    estimates, errors = [], []
    for seed in range(300):
        rng = random.Random(seed)
        rows = []
        for i in range(120):
            n, share = rng.randint(1, 12), rng.betavariate(8, 2)
            rows.append((i % 2, i, n, sum(rng.random() < share for _ in range(n))))
        found = contrast(counted(rows), difference(1))
        assert found is not None
        estimates.append(found.estimate)
        errors.append(found.se)
    assert fmean(errors) == pytest.approx(pstdev(estimates), rel=0.1)


def test_what_is_known_before_takes_out_variance_and_no_truth() -> None:
    estimates: dict[bool, list[float]] = {False: [], True: []}
    reduced = []
    for seed in range(200):
        rng = random.Random(seed)
        table = Clusters()
        for i in range(100):
            size = rng.gauss(10, 2)  # long prompts fail more
            for _ in range(20):
                table.add((i % 2, 0), i, rng.random() < 0.6 - 0.05 * (size - 10) - 0.05 * (i % 2), False, None, size)
        for adjust in (False, True):
            found = contrast(table, difference(1), adjust=adjust)
            assert found is not None
            estimates[adjust].append(found.estimate)
            if adjust:
                reduced.append(found.reduced)
    assert fmean(estimates[True]) == pytest.approx(-0.05, abs=0.008)
    assert pstdev(estimates[True]) < 0.85 * pstdev(estimates[False])
    assert fmean(reduced) > 0.3


def test_an_arm_without_requests_and_too_few_clusters_say_nothing() -> None:
    assert contrast(counted([(0, 0, 5, 5), (0, 1, 5, 5), (0, 2, 5, 5)]), difference(1)) is None
    assert contrast(counted([(0, 0, 5, 5), (1, 1, 5, 5)]), difference(1)) is None


def test_other_columns_have_denominators_of_their_own() -> None:
    table = Clusters()
    for i in range(20):
        table.add((0, 0), i, True, False, None if i % 2 else 0.5, 1.0)
        table.add((1, 0), i, True, i == 0, 0.75, 1.0)
    paces = contrast(table, difference(1), PACE, PACED)
    errors = contrast(table, difference(1), ERRORS, REQUESTS)
    assert paces is not None
    assert errors is not None
    assert (paces.estimate, errors.estimate) == (0.25, 0.05)
    assert (table.total(0, GOOD), table.total(0, PACED)) == (20.0, 10.0)


def test_memory_is_bounded_by_merging_neighbours_and_no_request_is_lost() -> None:
    table = Clusters(most=8)
    for block in range(100):
        table.add((0, 0), block, True, False, None, 0.0)
    assert len(table.rows[0, 0]) <= 8
    assert table.shift == 4
    assert table.total(0, REQUESTS) == 100
    assert Clusters.read(table.document()).rows == table.rows


def test_counts_of_two_gateways_add_up_whatever_each_has_merged() -> None:
    one, two, both = Clusters(most=8), Clusters(most=64), Clusters(most=8)
    for block in range(40):
        one.add((0, 0), block, block % 3 == 0, False, None, 1.0)
        two.add((0, 0), block, block % 2 == 0, False, None, 2.0)
        both.add((0, 0), block, block % 3 == 0, False, None, 1.0)
        both.add((0, 0), block, block % 2 == 0, False, None, 2.0)
    assert one.merged(two).rows == both.rows == two.merged(one).rows


@pytest.mark.parametrize("document", [{}, {"shift": 0, "cells": [[0, 0, [[1, 2.0]]]]}, {"shift": "x", "cells": []}])
def test_a_spoilt_document_is_refused(document: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Clusters.read(document)


def test_what_never_failed_is_as_sure_as_its_number_of_requests_and_no_surer() -> None:
    table = counted([(arm, cluster, 10, 10) for arm in (0, 1) for cluster in range(30)])
    found = contrast(table, difference(1))
    assert found is not None
    assert found.estimate == 0.0
    # (300 + 2) of (300 + 4), twice
    assert found.se == pytest.approx((2 * (302 / 304) * (2 / 304) / 300) ** 0.5)


def test_one_bad_block_makes_the_difference_skewed() -> None:
    def skew(bad: int) -> float:
        clusters = Clusters()
        for block in range(20):
            for _ in range(50):
                clusters.add((0, 0), block, block >= bad, False, None, 0.0)
                clusters.add((1, 0), block, True, False, None, 0.0)
        found = contrast(clusters, {(1, 0): 1.0, (0, 0): -1.0})
        assert found is not None
        return round(found.skew, 2)

    assert skew(bad=1) == 0.92  # more such blocks would make the difference larger
    assert skew(bad=10) == 0.0
    assert skew(bad=19) == -0.92
