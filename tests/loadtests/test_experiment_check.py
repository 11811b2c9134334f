"""The intervals against a known truth, in small: the full table is `python -m loadtests.bench experiments`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loadtests.experiment_check import assigned, check, settings
from loadtests.experiment_engine import agreement
from loadtests.experiment_guard import PLANS, stops
from loadtests.experiment_model import AFFINITY, SPREAD, World, run, traffic
from policies.designs import Assigner

SMALL = replace(World(), replicas=2, rate_rps=2.0, sessions=40)


def test_every_design_covers_the_truth_where_a_plain_split_is_biased() -> None:
    found = check(World(), 60, 2400.0, chunk=60)
    assert found.truth > 0.02
    for name in ("split", "partition", "switchback"):
        row = found.rows[name]
        assert row.covers(found.truth) >= 0.93, name
        assert row.always(found.truth) >= 0.9, name
        assert row.false_share <= 0.065, name
    plain = float(np.mean(found.rows["plain A/B"].estimates))
    assert plain < 0.9 * found.truth  # arms share queues: the worse one drags the better one down
    for name in ("split", "switchback"):
        assert abs(np.mean(found.rows[name].estimates) - found.truth) < 0.5 * abs(plain - found.truth), name


def test_the_model_assigns_slices_as_the_gateway_does() -> None:
    load = traffic(SMALL, 1200.0, 3, np.random.default_rng(0))
    for setting in settings():
        arms, levels, blocks, counted, _ = assigned(setting.plan, load, range(5, 8))
        for r in range(3):
            assigner = Assigner(replace(setting.plan, seed=5 + r))
            for k in range(0, load.at.shape[0], 37):
                given = assigner.assign("any", float(load.at[k, r]))
                if setting.name == "switchback":
                    assert (given.arm, given.level) == (arms[k, r], levels[k, r])
                if setting.name == "split":
                    assert given.level == levels[k, r]
                if setting.name != "plain A/B":
                    assert (given.block, given.counted) == (blocks[k, r], counted[k, r]), setting.name


def test_the_queue_model_answers_as_the_engine_model_does() -> None:
    load = traffic(World(), 180.0, 1, np.random.default_rng(4))
    found = agreement(World(), load, 0, 180.0)
    for policy in (SPREAD, AFFINITY):
        assert found.model[policy][0] == pytest.approx(found.engine[policy][0], abs=0.03)
        assert found.model[policy][1] == pytest.approx(found.engine[policy][1], rel=0.12)
    assert min(found.differences) > 0.0


@pytest.mark.parametrize("design", PLANS)
def test_a_bad_arm_is_stopped_within_a_minute_and_good_ones_go_on(design: str) -> None:
    bad = stops("bad: all to one replica", 10, 60.0, design=design)
    assert (len(bad.at_s), bad.within_60) == (10, 10)
    assert stops("good: better", 5, 90.0, every_s=2.0, design=design).at_s == []
    assert stops("good: the same", 5, 90.0, every_s=2.0, design=design).at_s == []


def test_caches_and_queues_are_shared_so_affinity_helps_those_who_do_not_use_it() -> None:
    load = traffic(SMALL, 1200.0, 10, np.random.default_rng(1))
    alone, _ = run(SMALL, load, np.full(load.at.shape, SPREAD, np.int8))
    half = (load.drawn < 0.5).astype(np.int8)
    beside, _ = run(SMALL, load, half)
    spread = half == 0
    assert beside[spread].mean() < alone[spread].mean()
