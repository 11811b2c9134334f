"""What the streams teach: an engine is made up here, and the fits must find it again."""

from __future__ import annotations

import random

import pytest

from policies.predictor import DecodeFit, Errors, Margin, Margins, OutputPrior, PrefillFit


def engine_s(uncached: float, cached: float) -> float:
    """8 ms a request, 67 us a token, 3.4 ns per token and token before it (an A100 with an 8B model)."""
    return 0.008 + 67e-6 * uncached + 3.4e-9 * uncached * (cached + uncached / 2)


def teach(fit: PrefillFit, prior: PrefillFit | None, samples: int, *, slow: float = 1.0, seed: int = 1) -> None:
    rng = random.Random(seed)
    for _ in range(samples):
        cached, uncached = rng.choice([0, 0, 2000, 16000]), rng.randint(200, 30000)
        fit.add(uncached, uncached * (cached + uncached / 2), slow * engine_s(uncached, cached), prior)


def test_before_anything_is_seen_the_hint_stands() -> None:
    fit = PrefillFit(8000.0, 0.05)
    assert fit.seconds(4000, 0) == pytest.approx(0.5)
    assert fit.overhead_s == 0.05


def test_rate_overhead_and_attention_are_found_together() -> None:
    fit = PrefillFit(8000.0, 0.05)
    teach(fit, None, 60)
    for uncached, cached in ((500, 0), (8000, 0), (8000, 16000), (70000, 0)):
        assert fit.overhead_s + fit.seconds(uncached, cached) == pytest.approx(engine_s(uncached, cached), rel=0.02)


def test_a_new_replica_predicts_what_the_fleet_knows_and_a_slow_one_separates() -> None:
    fleet = PrefillFit(8000.0, 0.05)
    teach(fleet, None, 60)
    new = PrefillFit(8000.0, 0.05)
    new.adopt(fleet)
    assert new.seconds(8000, 0) == pytest.approx(fleet.seconds(8000, 0))
    teach(new, fleet, 100, slow=2.0, seed=2)
    assert new.seconds(8000, 0) == pytest.approx(2 * (engine_s(8000, 0) - 0.008), rel=0.2)


def test_one_absurd_sample_does_not_ruin_the_fit() -> None:
    fit = PrefillFit(8000.0, 0.05)
    teach(fit, None, 60)
    fit.add(1000, 1000 * 500, 300.0, None)  # a peer's long prompt was in front of ours
    assert fit.seconds(8000, 0) == pytest.approx(engine_s(8000, 0) - 0.008, rel=0.2)


def test_samples_of_one_size_still_give_a_rate() -> None:
    fit = PrefillFit(8000.0, 0.05)
    for _ in range(20):
        fit.add(1000, 1000 * 500, 0.1, None)
    assert fit.overhead_s + fit.seconds(1000, 0) == pytest.approx(0.1, rel=0.01)
    assert fit.overhead_s >= 0.0


def test_the_margin_finds_the_quantile_asked_for() -> None:
    margin, rng = Margin(0.9), random.Random(3)
    for _ in range(5000):
        margin.observe(rng.uniform(0.5, 1.5), 1.0)
    assert margin.q == pytest.approx(1.4, abs=0.08)


def test_a_margin_is_bounded_whatever_happens() -> None:
    low, high = Margin(0.95), Margin(0.95)
    for _ in range(10_000):
        low.observe(0.0, 1.0)
        high.observe(100.0, 1.0)
    assert (low.q, high.q) == (0.8, 4.0)


def test_short_predictions_do_not_widen_the_margin_of_long_ones() -> None:
    margins = Margins(0.95)
    for _ in range(500):
        margins.observe("chat", 0.3, 0.1)  # waited for the step in progress
        margins.observe("chat", 10.0, 10.0)
    assert margins.bound("chat", 0.1) > 0.3
    assert margins.bound("chat", 10.0) < 11.5
    assert margins.bound("other", 1.0) == pytest.approx(1.2)  # nothing known yet


def test_decode_steps_with_and_without_prefill_are_kept_apart() -> None:
    decode = DecodeFit()
    assert decode.mean(0.5) is None
    decode.add(100, 1.0, busy=False)
    assert decode.mean(0.5) == pytest.approx(0.01)
    decode.add(10, 1.5, busy=True)
    assert (decode.idle_s, decode.busy_s) == (pytest.approx(0.01), pytest.approx(0.15))
    assert decode.mean(0.8) == pytest.approx(1 / (0.8 / 0.15 + 0.2 / 0.01))


def test_events_that_came_in_one_read_have_no_gap_and_are_no_division_by_zero() -> None:
    decode = DecodeFit()
    decode.add(3, 0.0, busy=False)
    decode.add(3, 0.0, busy=True)
    assert decode.mean(0.5) == pytest.approx(1e-6)
    assert decode.mean(1.0) == pytest.approx(1e-6)


def test_output_length_is_told_learnt_or_capped() -> None:
    outputs = OutputPrior()
    assert outputs.expected("chat", None, 0) == 256.0
    assert outputs.expected("chat", 100, 0) == 100.0
    for _ in range(300):
        outputs.observe("chat", 40)
    assert outputs.expected("chat", 4096, 0) == pytest.approx(40.0)
    assert outputs.expected("chat", 4096, 700) == 700.0


def test_prediction_error_and_its_sign() -> None:
    errors = Errors()
    for _ in range(100):
        errors.observe(2.0, 1.0)
    assert (errors.relative, errors.bias) == (pytest.approx(0.5), pytest.approx(-0.5))
