"""A journal replayed: what was recorded stands beside what is simulated, and what is assumed is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from typer.testing import CliRunner

from loadtests.cli import build
from loadtests.counterfactual import caveats, recorded, show


def line(at: float, **more: Any) -> dict[str, Any]:
    return {
        "schema": 1, "received_unix": 1.8e9 + at, "kind": "generate", "policy": "forebay", "service_class": "standard",
        "prompt_bytes": 1024, "prompt_tokens": [256, "usage"], "completion_tokens": [20, "usage"],
        "chain": [1, 2, 3, 4], "attempts": [{"replica_id": "a"}], "session": "s", "outcome": "success",
        "partition": "good", "ttft_s": 0.1, **more,
    }  # fmt: skip


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def test_what_was_recorded_is_told_by_policy(tmp_path: Path) -> None:
    path = write(
        tmp_path / "j.jsonl",
        line(0.0),
        line(5.0, partition="slow_ttft", ttft_s=20.0),
        line(8.0, outcome="shed", partition="rejected", completion_tokens=[None, "estimate"], ttft_s=None, attempts=[]),
        line(9.0, policy="round_robin", attempts=[{"replica_id": "b"}], prompt_tokens=[256, "estimate"]),
        line(9.5, client_retry=1),
        line(9.6, kind="pool"),
    )
    found = recorded(path)
    told = found.policies["forebay"]
    assert (told.requests, told.good, told.shed, told.ttft_s) == (3, 1, 1, [0.1, 20.0])
    assert told.attainment.estimate == 1 / 3
    assert (found.requests, found.retries, found.unanswered, found.estimated, found.replicas) == (4, 1, 1, 1, 2)
    assert found.span_s == 9.0


def test_only_the_caveats_that_apply_are_printed_each_with_its_number(tmp_path: Path) -> None:
    clean = recorded(write(tmp_path / "clean.jsonl", line(0.0, session=None), line(1.0, session=None)))
    assert len(caveats(clean, 1, [1.0])) == 3
    rough = recorded(
        write(
            tmp_path / "rough.jsonl",
            line(0.0, completion_tokens=[None, "estimate"]),
            line(1.0, prompt_bytes=200_000),
            line(2.0, client_retry=1),
            line(3.0, policy="round_robin"),
        )
    )
    said = "\n".join(caveats(rough, 8, [1.0, 2.0]))
    for part in (
        "33.3% had no answer",
        "33.3% of prompts are longer",
        "1 retries of clients",
        "names 1 replicas, simulated are 8",
        "at another load than 1",
        "several policies ran",
        "100% of requests belong to a session",
    ):
        assert part in said


def test_the_policy_that_ran_stands_beside_itself(tmp_path: Path) -> None:
    found = recorded(write(tmp_path / "j.jsonl", *[line(float(i)) for i in range(10)]))
    console = Console(record=True, width=160)
    show(console, found, [{"policy": "forebay", "load": 1.0, "attainment": 0.9}], 1)
    told = console.export_text()
    assert "100.0% (72.2% to 100.0%)" in told
    assert "-10.0%" in told
    show(console, found, [{"policy": "lmetric", "load": 1.0, "attainment": 0.9}], 1)
    assert "not simulated: add --policy forebay" in console.export_text()


def test_simulate_takes_a_journal_and_prints_what_it_assumes(tmp_path: Path) -> None:
    path = write(tmp_path / "j.jsonl", *[line(i * 0.5, session=f"s{i % 9}") for i in range(400)])
    options = "--window 60 --drain 60 --seeds 1 --jobs 1 --replicas 2 --policy round_robin --policy forebay"
    arguments = ["simulate", "--trace", str(path), *options.split(), "--out", str(tmp_path / "out")]
    answer = CliRunner().invoke(build(arguments), arguments)
    assert answer.exit_code == 0, answer.output
    assert "policy that ran" in answer.output
    assert "arrivals are those of the journal" in answer.output
    assert (tmp_path / "out" / "summary.json").exists()
