"""Calibration finds the profile that made the figures, and validation compares like with like."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtests import profiles, tokens
from loadtests.calibrate import DECODES, PREFILLS, Facts, Measured, chunks_of, facts, fit, measure, predicted_s
from loadtests.engine import EngineConfig
from loadtests.observe import Observed, ReplicaError
from loadtests.profiles import Profile
from loadtests.replica import Fleet, ReplicaSettings
from loadtests.validate import Outcome, Row, compared, modelled, schedules

TRUE = Profile(
    "true", 0.012, 0.004, 60e-6, 0.1e-6, 3e-9, 0.0, 2e-4, 0.003,
    num_blocks=300, block_size=32, max_num_batched_tokens=2048, max_num_seqs=32,
)  # fmt: skip


def test_a_prompt_alone_is_computed_in_full_budgets_then_the_rest() -> None:
    assert chunks_of(5000, 0, 2048) == ((2048, 0), (2048, 2048), (904, 4096))
    assert chunks_of(1024, 992, 2048) == ((32, 992),)


def test_the_time_to_a_first_token_is_the_sum_of_its_chunks() -> None:
    one = Measured("TTFT of 3000", 0.0, chunks_of(3000, 0, 2048))
    by_hand = (
        0.003
        + (0.004 + 2048 * 60e-6 + 2e-4 + 3e-9 * 2048 * 1024)
        + (0.004 + 952 * 60e-6 + 2e-4 + 3e-9 * 952 * (2048 + 476))
    )
    assert predicted_s(one, TRUE) == pytest.approx(by_hand)


def test_a_fit_predicts_what_it_has_not_seen_within_three_percent() -> None:
    figures = [Measured(f"TTFT {n}", 0.0, chunks_of(n, 0, 2048)) for n in PREFILLS]
    figures += [Measured(f"TPOT {n}", 0.0, sequences=n, context=c + 24) for n, c in DECODES]
    figures = [replace(m, seconds=predicted_s(m, TRUE)) for m in figures]
    found = fit(figures, replace(TRUE, floor_s=0.0, base_s=0.0, per_token_s=0.0))
    for unseen in (
        Measured("", 0.0, chunks_of(700, 0, 2048)),
        Measured("", 0.0, chunks_of(5000, 0, 2048)),
        Measured("", 0.0, sequences=12, context=500.0),
    ):
        assert predicted_s(unseen, found) == pytest.approx(predicted_s(unseen, TRUE), rel=0.03)


async def test_calibration_reads_and_measures_a_replica_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtests.calibrate.PREFILLS", (64, 1024))
    monkeypatch.setattr("loadtests.calibrate.DECODES", ((2, 32),))
    quick = replace(TRUE, floor_s=0.001, base_s=0.0005, per_token_s=1e-6)
    async with Fleet.of(ReplicaSettings(EngineConfig(quick, max_model_len=4096), model="m"), 1) as fleet:
        known = await facts(fleet.urls[0])
        figures = await measure(fleet.urls[0], known, 2048, 1, 7)
    assert known == Facts("m", 4096, 300, 32)
    assert [m.label for m in figures] == [
        "TTFT of 64 tokens", "TTFT of 1024 tokens", "TTFT of 1024, 992 cached", "TPOT of 2 at 56 context",
    ]  # fmt: skip
    assert all(m.seconds > 0 for m in figures)


async def test_what_is_no_replica_is_refused_by_url() -> None:
    with pytest.raises(ReplicaError, match=r"http://127\.0\.0\.1:9: no vLLM replica answers there"):
        await facts("http://127.0.0.1:9")


def test_schedules_are_equal_for_equal_seeds_and_hold_what_they_promise() -> None:
    found = schedules(3, 2, 9568)
    assert found == schedules(3, 2, 9568)
    assert set(found) == {"poisson", "shared", "mixed", "tight"}
    asked = sum(len(row.ids) + row.output_tokens for row in found["tight"] if row.replica == 0)
    assert asked > 1.4 * 9568


def test_the_model_answers_every_row_and_counts_cache_and_preemptions() -> None:
    config = EngineConfig(TRUE, max_model_len=8192)
    found = schedules(3, 2, 299 * 32)
    shared, tight = modelled(config, 2, found["shared"]), modelled(config, 2, found["tight"])
    assert [o.output_tokens for o in shared.rows] == [24] * 18
    assert sorted({o.cached_tokens for o in shared.rows}) == [0, 1024]
    assert sum(o.cached_tokens == 0 for o in shared.rows) == 6  # three heads on two replicas
    assert tight.preemptions > 0


def test_a_row_of_the_model_takes_the_time_its_steps_take() -> None:
    rows = [Row(1.0, 0, list(range(300, 364)), 3)]
    seen = modelled(EngineConfig(TRUE, max_model_len=8192), 1, rows).rows[0]
    first = 0.003 + 0.012 + 2e-4 + 3e-9 * 64 * 32
    assert seen.ttft_s == pytest.approx(first)
    assert seen.tpot_s == pytest.approx(0.012 + 2e-4 + 0.1e-6 * 65.5)


def test_figures_are_compared_row_by_row() -> None:
    theirs = Outcome([Observed(100, 11, 1.0, 2.0, 64), Observed(100, 11, 3.0, 5.0, 0)], 4)
    ours = Outcome([Observed(100, 11, 1.1, 2.1, 64), Observed(100, 11, 2.7, 4.7, 32)], 5)
    figures = compared(theirs, ours)
    assert figures["ttft_p90_s"] == (3.0, 2.7)
    assert figures["cached_tokens"] == (64, 96)
    assert figures["rows_with_equal_cached_tokens"] == (2, 1)
    assert figures["preemptions"] == (4, 5)


@pytest.mark.parametrize("name", profiles.PROFILES)
def test_built_in_profiles_say_that_their_figures_are_third_party(name: str) -> None:
    profile = profiles.load(name)
    assert "third party" in profile.source
    assert profiles.from_mapping({k: getattr(profile, k) for k in profile.__slots__}) == profile


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"floor": 1.0}, "profile field 'floor' is unknown"),
        ({"name": "x", "floor_s": "fast"}, "profile field 'floor_s' is 'fast'; it must be a float"),
        ({"name": "x"}, "profile lacks floor_s, base_s"),
    ],
)
def test_a_wrong_profile_is_refused_by_field(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profiles.from_mapping(values)


def test_an_unknown_profile_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'b200' is neither built in \(a100-8b, h100-8b, a100-70b, h100-70b\)"):
        profiles.load("b200")


def test_steps_of_the_a100_profile_are_those_of_its_source() -> None:
    a100 = profiles.load("a100-8b")
    linear_ms = [(a100.step_s(n, 0, 0, 0) - a100.overhead_s) * 1000 for n in (1, 512, 2048)]
    assert linear_ms == pytest.approx([10.5, 41.2, 143.9], rel=0.01)
    assert a100.step_s(64, 0, 64 * 4000, 0) - a100.step_s(64, 0, 0, 0) == pytest.approx(0.021, rel=0.01)


def test_equal_text_gives_equal_tokens_and_chained_ids() -> None:
    one, two = tokens.from_text("word " * 40), tokens.from_text("word " * 40 + "more")
    assert tokens.chain(one, 16)[:3] == tokens.chain(two, 16)[:3]
    assert tokens.chain(one, 16, salt="a")[0] != tokens.chain(one, 16)[0]
    assert tokens.count(one) == 50
