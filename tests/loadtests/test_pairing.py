"""Comparisons from literal runs: what may be claimed, and what is refused."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from loadtests.pairing import AGAIN, RefusedError, compare, compare_all, discordant, order
from loadtests.record import Record
from policies.objectives import Partition


def run(policy: str, seed: int, goodput: float | None, **more: object) -> dict[str, object]:
    part = {"all": {"offered": 10, "attainment": 0.5 if goodput is None else goodput / 4}}
    made: dict[str, object] = {
        "policy": policy, "load": 1.0, "seed": seed, "verdict": "valid" if goodput is not None else "invalid",
        "schedule_sha256": f"s{seed}", "window_s": 60.0, "drain_s": 30.0, "view": "open loop",
        "goodput_rps": goodput, "attainment": None if goodput is None else goodput / 4,
        "by_class": part, "by_bucket": part,
    }  # fmt: skip
    return made | more


def blocks(policy: str, *goodputs: float | None) -> list[dict[str, object]]:
    return [run(policy, seed, goodput) for seed, goodput in enumerate(goodputs)]


A = blocks("round_robin", 1.0, 1.1, 0.9, 1.0, 1.2)
B = blocks("forebay", 2.0, 2.0, 2.0, 2.0, 2.2)


def test_a_difference_in_every_block_is_claimed_with_its_interval() -> None:
    found = compare([*A, *B], "round_robin", "forebay", 1.0)
    assert found["goodput_rps"]["estimate"] == pytest.approx(1.0)
    assert 0.9 <= found["goodput_rps"]["low"] < found["goodput_rps"]["high"] <= 1.1
    assert found["statement"].startswith("forebay better than round_robin: +1.000/s [")
    assert found["blocks"] == [0, 1, 2, 3, 4]
    assert found["by_bucket"]["all"]["offered"] == 50


def test_equal_arms_show_no_difference() -> None:
    same = [*A, *blocks("other", 1.1, 1.0, 1.0, 0.9, 1.2)]
    assert compare(same, "round_robin", "other", 1.0)["statement"].startswith("other against round_robin: no diff")


def test_four_blocks_carry_no_claim() -> None:
    found = compare([*A[:4], *B[:4]], "round_robin", "forebay", 1.0)
    assert found["statement"].endswith("fewer than 5 blocks, no claim")


def test_an_effect_within_the_noise_of_the_same_arm_twice_is_not_claimed() -> None:
    again = blocks("round_robin" + AGAIN, 2.5, 1.1, 0.9, 1.0, 1.2)
    (found,) = compare_all([*A, *again, *B])
    assert found["noise_floor_rps"] == 1.5
    assert "within the noise of 1.500/s" in found["statement"]


def test_a_block_with_an_invalid_run_is_left_out_of_both() -> None:
    spoiled = blocks("forebay", 2.0, None, 2.0, 2.0, 2.2)
    found = compare([*A, *spoiled], "round_robin", "forebay", 1.0)
    assert (found["blocks"], found["left_out"]["invalid"]) == ([0, 2, 3, 4], [1])


@pytest.mark.parametrize(("name", "value", "what"), [
    ("schedule_sha256", "other", "schedule and objectives"),
    ("drain_s", 60.0, "drain"),
    ("view", "response-paced", "view"),
    ("setup", {"version": "0.32.0"}, "set-up"),
])  # fmt: skip
def test_runs_that_are_not_alike_are_refused(name: str, value: object, what: str) -> None:
    with pytest.raises(RefusedError, match=f"differ in {what}"):
        compare([*A, run("forebay", 0, 2.0, **{name: value})], "round_robin", "forebay", 1.0)


def test_the_same_block_twice_is_refused() -> None:
    with pytest.raises(RefusedError, match="ran seed 0 at load 1 twice"):
        compare([*A, run("round_robin", 0, 1.0), *B], "round_robin", "forebay", 1.0)


def test_an_unknown_baseline_is_named() -> None:
    with pytest.raises(RefusedError, match="baseline 'x' is not among the arms: round_robin, forebay"):
        compare_all([*A, *B], "x")


def test_two_arms_run_abba() -> None:
    assert [order(["a", "b"], block) for block in range(2)] == [["a", "b"], ["b", "a"]]


@pytest.mark.parametrize("k", [2, 3, 4, 5, 6])
def test_places_and_followers_are_balanced(k: int) -> None:
    arms = [str(i) for i in range(k)]
    rows = [order(arms, block) for block in range(2 * k)]
    places = Counter((arm, place) for row in rows for place, arm in enumerate(row))
    follows = Counter(pair for row in rows for pair in pairwise(row))
    assert set(places.values()) == {2}
    assert set(follows.values()) == {2}


def test_rows_good_under_one_arm_only_are_counted_by_prompt_length() -> None:
    def record(id: int, good: bool, prompt: int = 10) -> Record:
        return Record(id, prompt_tokens=prompt, partition=Partition.GOOD if good else Partition.SLOW_TTFT)

    found = discordant(
        [(0, [record(0, True), record(1, False), record(2, True, 5_000)])],
        [(0, [record(0, False), record(1, False), record(2, True, 5_000)])],
    )
    assert found == {
        "to_1k": {"both": 0, "only_a": 1, "only_b": 0, "neither": 1},
        "4k_16k": {"both": 1, "only_a": 0, "only_b": 0, "neither": 0},
    }
