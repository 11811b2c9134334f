"""`forebay boundary`: what it writes and refuses; the search itself is tested on known capacities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from loadtests import boundary, cli, demo
from loadtests.offer import offer
from loadtests.playground import Playground
from loadtests.record import Record
from loadtests.schedule import Schedule
from policies.objectives import Partition
from tests.loadtests.on_wire import PATIENT

CAPACITY = {"round_robin": 1.0, "forebay": 2.0}


def made_up(arms: list[str], *_: object) -> boundary.Runner:
    def run(arm: str, schedule: Schedule) -> list[Record]:
        """Everything is good up to the arm's capacity, nothing beyond."""
        good = schedule.recipe.load <= CAPACITY[arm]
        records = []
        for row in schedule.rows:
            record = Record(row.id, scheduled_s=row.at_s, complete=True, attempts=1)
            record.partition = Partition.GOOD if good else Partition.SLOW_TTFT
            record.end_s = (row.at_s or 0.0) + 0.1
            records.append(record)
        return records

    return run


def invoke(tmp_path: Path, *more: str):  # type: ignore[no-untyped-def]
    arguments = [
        "boundary", "--workload", "unique", "--window", "60", "--drain", "10", "--arm", "round_robin", "--arm",
        "forebay", "--out", str(tmp_path), *more,
    ]  # fmt: skip
    return CliRunner().invoke(cli.build(["boundary"]), arguments)


def test_the_ratio_of_two_boundaries_is_printed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "virtual_runner", made_up)
    result = invoke(tmp_path, "--repeats", "2", "--window", "8")  # the length of a run is nothing to the search
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "boundary.json").read_text())
    for arm, capacity in CAPACITY.items():
        for one in found["boundaries"][arm]:
            assert one["load"] <= capacity < one["above"] <= one["load"] * 1.05
            assert one["confirmed"] is True
    ratio, low, high = found["ratio_to_first"]["forebay"]
    assert 1.9 < low <= ratio <= high < 2.1
    assert found["ratio_to_first"]["round_robin"] == [1.0, 1.0, 1.0]


def test_recovery_after_a_burst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "virtual_runner", made_up)
    result = invoke(tmp_path, "--burst", "3x@20+10", "--from", "0.5", "--seeds", "1")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "boundary.json").read_text())
    assert found["recoveries"]["forebay"][0]["recovered_after_s"] == 0.0


def test_a_live_probe_switches_the_policy_and_one_that_measured_the_generator_ends_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdicts = iter(["valid", "invalid"])

    def judged(*arguments: Any) -> tuple[dict[str, Any], list[Record]]:
        """The real run; how well this machine kept up is not the story."""
        entry, records = run_once(*arguments)
        return {**entry, "verdict": next(verdicts), "reasons": ["lag"]}, records

    run_once = boundary.run_once
    monkeypatch.setattr(boundary, "run_once", judged)
    made = offer("unique", None, window_s=2.0, drain_s=20.0, objectives=("ttft=60s,tpot=10s",), form=None)
    with Playground(demo.replica_settings(), 2, PATIENT | {"policy": {"name": "random"}}) as ground:
        arms = [boundary.parse_arm(one, ground.url) for one in ("round_robin", "least_request")]
        state = boundary.state_of(arms, ground.url, tuple(ground.replica_urls), None)
        run = boundary.live_runner(Console(quiet=True), made, arms, state, 2.0)
        schedule = made.schedule(0, 1.0)
        records = run("least_request", schedule)
        policy = httpx.get(f"{ground.url}/admin/policy", timeout=60, verify=False).json()
        with pytest.raises(boundary.InvalidRunError, match=r"round_robin load 1.000: INVALID, lag"):
            run("round_robin", schedule)
    assert len(records) == len(schedule.rows) > 0
    assert all(record.partition is not None and record.attempts >= 1 for record in records)
    assert "least_request" in str(policy)


def test_a_search_that_finds_nothing_says_what_may_be_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "virtual_runner", made_up)
    monkeypatch.setitem(CAPACITY, "round_robin", 0.0)
    result = invoke(tmp_path)
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    assert "round_robin: no load was found that surely keeps 95%: too few requests in each probe" in told
    assert "forebay: no load" not in told


@pytest.mark.parametrize(("more", "says"), [
    (["--burst", "3x@50+20"], "it must end before the window of 60 s does"),
    (["--arm", "forebay+pace"], "unknown suffix 'pace'"),
    (["--arm", "no_such_policy"], "policy 'no_such_policy' is unknown"),
    (["--profile", "tpu"], "profile 'tpu' is neither built in"),
    (["--from", "0"], "--from 0: a load above 0 would be right"),
])  # fmt: skip
def test_bad_usage_is_named(more: list[str], says: str, tmp_path: Path) -> None:
    result = invoke(tmp_path, *more)
    assert result.exit_code == 2
    assert says in result.stderr
