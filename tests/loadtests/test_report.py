"""The report: one page that needs no other file, made from files, saying what is invalid."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtests import cli, plots, report, results
from loadtests.live_result import summarise
from loadtests.record import Record
from loadtests.schedule import Recipe, Row, Schedule
from loadtests.sustain import Sustained, verdict
from policies.model import ServiceClass
from policies.objectives import Partition

CLASSES = {"interactive": ServiceClass("interactive", ttft_s=2.0, tpot_s=0.1)}
ON_TIME = Sustained([0.001] * 4, [0.001] * 4, 0.1, 4, 4)
TOO_LATE = Sustained([0.3] * 4, [0.001] * 4, 0.1, 4, 4)


def records(good_of_10: int) -> list[Record]:
    made = []
    for i in range(10):
        r = Record(i, None, 0, "interactive", 500 * (i + 1), 3, True, float(i), float(i), attempts=1)
        if i < good_of_10:
            r.partition, r.complete, r.replica = Partition.GOOD, True, f"r{i % 2}"
            r.first_s, r.last_s, r.end_s = i + 0.5, i + 0.7, i + 0.8
            r.completion_tokens, r.served_prompt_tokens, r.cached_tokens = 3, 500 * (i + 1), 100
        else:
            r.partition, r.reason, r.end_s = Partition.REJECTED, "infeasible", i + 0.1
        made.append(r)
    return made


def folder(tmp_path: Path, loads: tuple[float, ...] = (1.0, 2.0), sustained: Sustained = ON_TIME) -> Path:
    runs, lines = [], []
    for load in loads:
        for seed in range(2):
            rows = tuple(Row(i, float(i), 500 * (i + 1), 3, (i,) * 10) for i in range(10))
            rows = tuple(Row(r.id, r.at_s, r.prompt_tokens, 3, tuple(range(-(-r.prompt_tokens // 512)))) for r in rows)
            schedule = Schedule(rows, 10.0, 5.0, 512, CLASSES, Recipe("rows", seed, load))
            for arm, good in (("round_robin", 4), ("forebay", 8 if load > 1 else 5)):
                found = records(good)
                runs.append(summarise(schedule, found, verdict([sustained], 2.0), policy=arm, replicas=2))
                lines += [results.line(r, arm, load, seed) for r in found]
    results.write(tmp_path, runs, {"command": "forebay <test>", "cores": 2})
    (tmp_path / "requests.jsonl").write_bytes(b"".join(lines))
    return tmp_path


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose page is written; drawing takes seconds, so it is done once."""
    made = folder(tmp_path_factory.mktemp("drawn"))
    report.build(made)
    return made


def test_the_page_needs_no_other_file(drawn: Path) -> None:
    page = (drawn / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,40})', page)
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    names = {path.name for path in (drawn / "plots").iterdir()}
    assert names == {
        "goodput.png", "attainment.png", "outcomes.png", "ttft.png", "tpot.png", "timeline.png", "reuse.png",
        "balance.png",
    }  # fmt: skip
    assert all((drawn / "plots" / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_it_says_what_may_be_claimed_and_holds_the_numbers(drawn: Path) -> None:
    page = (drawn / "report.html").read_text()
    assert "fewer than 5 blocks, no claim" in page
    assert "4 of 4 runs" not in page
    assert "8 of 8 runs kept their schedule and count." in page
    assert "Detailed figures at load 2, where the arms differ most." in page
    assert "forebay &lt;test&gt;" in page  # escaped
    embedded = re.search(r"<pre>(.*?)</pre>", page, re.DOTALL)
    assert embedded is not None


def test_invalid_runs_are_shown_as_invalid_and_one_load_gets_bars(tmp_path: Path) -> None:
    page = report.build(folder(tmp_path, loads=(1.0,), sustained=TOO_LATE)).read_text()
    assert '<span class="verdict invalid">INVALID</span>' in page
    assert "lag p99 300.0 ms is over 20.0 ms" in page
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert "goodput-bars.png" in names
    assert "goodput.png" not in names


def test_every_arm_has_its_own_look_and_ours_stands_out() -> None:
    looks = plots.look_of(["round_robin", "forebay", "a", "b", "c", "d", "e", "oracle"])
    assert looks["forebay"]["color"] == plots.BLUE
    assert len({look["color"] for look in looks.values()}) == 8
    assert looks["oracle"]["linestyle"] == ":"


@pytest.mark.parametrize(("content", "says"), [
    (None, "no summary of a run"),
    ({"schema": "other/1"}, "schema is 'other/1'"),
    ({"schema": results.SCHEMA, "runs": []}, "holds no runs"),
])  # fmt: skip
def test_a_folder_that_holds_no_result_is_bad_usage(tmp_path: Path, content: object, says: str) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(json.dumps(content))
    result = CliRunner().invoke(cli.build(["report"]), ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_load_that_was_not_run_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.build(["report"]), ["report", str(folder(tmp_path)), "--load", "3"])
    assert result.exit_code == 2
    assert "--load 3: one of 1, 2 would be right" in result.stderr
