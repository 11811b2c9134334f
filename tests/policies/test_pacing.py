"""When prefill may start beside streams."""

from __future__ import annotations

import pytest

from policies.model import Pulse
from policies.pacing import Pace, allowed_share
from policies.predictor import DecodeFit
from policies.settings import Settings

LEARNT = DecodeFit(idle_s=0.013, busy_s=0.146)  # A100, 8B, 2,048 tokens a step
GOOD, NEAR = Pulse(live=20, near=1), Pulse(live=20, near=2)


def streaming(*pulses: Pulse, settings: Settings | None = None) -> Pace:
    pace = Pace()
    pace.enter(0.08)
    for i, pulse in enumerate(pulses):
        pace.pulse(pulse, LEARNT, settings or Settings(), 0.05 * (i + 1))
    return pace


def test_the_share_of_time_in_prefill_that_an_objective_allows() -> None:
    # 1 / (phi/0.146 + (1-phi)/0.013) = 0.08  =>  phi = 0.919
    assert allowed_share(0.013, 0.146, 0.08) == pytest.approx(0.919, abs=0.001)
    assert allowed_share(0.013, 0.146, 0.2) == 1.0  # even prefill steps alone keep it
    assert allowed_share(0.1, 0.146, 0.08) == 0.0  # decoding alone breaks it
    assert allowed_share(None, 0.146, 0.08) == 1.0  # nothing learnt yet


def test_prefill_waits_while_streams_run_near_their_objective_and_goes_when_they_are_back() -> None:
    pace = streaming(GOOD)
    pace.spend(3.0, 0.05)
    assert pace.wait(0.05) == 0.0  # one in twenty is not over 5 %
    pace.pulse(NEAR, LEARNT, Settings(), 0.10)
    assert pace.wait(0.10) > 0.0
    pace.pulse(GOOD, LEARNT, Settings(), 0.15)
    assert pace.wait(0.15) == 0.0


def test_an_engine_that_is_slow_without_prefill_too_gets_no_faster_by_waiting() -> None:
    pace, slow = Pace(), DecodeFit(idle_s=0.2, busy_s=0.21)  # short prompts vanish in its steps
    pace.enter(0.2)
    pace.pulse(Pulse(live=20, near=20), slow, Settings(), 0.05)
    pace.spend(3.0, 0.05)
    assert pace.wait(0.05) == 0.0
    assert pace.rate == 1.0


def test_a_replica_whose_streams_never_meet_theirs_still_gets_a_trickle() -> None:
    pace = streaming(NEAR)
    pace.spend(0.2, 0.05)
    now = 0.05
    while now < 1.45:
        now += 0.05
        pace.pulse(NEAR, LEARNT, Settings(), now)
        assert pace.wait(now) > 0.0
    for _ in range(5):
        now += 0.05
        pace.pulse(NEAR, LEARNT, Settings(), now)
    assert pace.wait(now) == 0.0  # 0.15 s of debt (0.05 s were saved up) at a share of 0.1 take 1.5 s


def test_without_pulses_nothing_is_known_and_nothing_waits() -> None:
    pace = streaming(NEAR)
    pace.spend(1.0, 0.05)
    assert pace.wait(0.06) > 0.0
    assert pace.wait(1.2) == 0.0


def test_a_fixed_rate_is_a_token_bucket() -> None:
    pace = streaming(GOOD, settings=Settings(pace=0.5))
    pace.spend(1.0, 0.05)
    assert pace.wait(0.05) == pytest.approx(1.9)  # 0.05 s were saved up
    assert pace.wait(2.1) == 0.0


def test_the_tightest_open_stream_counts() -> None:
    pace = Pace()
    for objective in (0.2, 0.08, 0.2, None):
        pace.enter(objective)
    assert pace.tightest_s == 0.08
    pace.leave(0.08)
    pace.leave(0.2)
    assert pace.tightest_s == 0.2
    pace.leave(0.2)
    pace.leave(None)
    assert pace.tightest_s is None
