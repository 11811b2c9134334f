"""`forebay experiment` against gateways that run: what is told to each, and what is added up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
from click.testing import Result
from typer.testing import CliRunner

from gateway.experiment_cli import experiment
from loadtests.replica import Fleet, ReplicaSettings
from policies.clusters import REQUESTS
from tests.gateway.running import Running, running, until

TABLE = """
[experiment]
name = "x"
swing = 0.0
wash_s = 0.0
arms = [{ name = "control" }, { name = "new", policy = "least_request" }]
"""


@pytest.fixture
async def sim() -> AsyncIterator[Fleet]:
    async with Fleet.of(ReplicaSettings(time_scale=50.0), 2) as fleet:
        yield fleet


async def call(*arguments: str) -> Result:
    """The command in a thread of its own, since it waits for gateways that run here."""
    return await asyncio.to_thread(CliRunner().invoke, experiment, list(arguments))


async def ask(g: Running, first: int, sessions: int) -> None:
    for i in range(first, first + sessions):
        answer = await g.http.post(
            "/v1/chat/completions",
            json={"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
            headers={"x-session-id": f"s{i}"},
        )
        assert answer.status_code == 200
    trial = g.gateway.experiments.trial
    assert trial is not None
    await until(lambda: trial.counts.buckets.total(0, REQUESTS) + trial.counts.buckets.total(1, REQUESTS) == sessions)


async def test_two_gateways_run_one_experiment_and_their_counts_add_up(sim: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(TABLE)
    async with running(*sim.urls) as one, running(*sim.urls) as two:
        urls = ["--url", one.url, "--url", two.url]
        started = await call("start", "--file", str(file), *urls)
        assert started.exit_code == 0, started.output
        assert started.output.count("experiment x: split of control, new") == 2
        await ask(one, 0, 10)
        await ask(two, 10, 15)
        shown = await call("status", "--json", *urls)
        told = orjson.loads(shown.output)
        assert sum(arm["requests"] for arm in told["arms"]) == 25
        page = await call("status", *urls)
        assert "new (least_request)" in " ".join(page.output.split())
        refused = await call("weights", "nobody=2", *urls)
        assert (refused.exit_code, "one of control, new would be right" in refused.output) == (1, True)
        refused = await call("stop", "--arm", "nope", *urls)
        assert refused.exit_code == 1
        assert 'arm "nope" is not known; one of new would be right' in refused.output
        await call("weights", "new=2", "--url", one.url)
        apart = await call("status", *urls)
        assert (apart.exit_code, "set the same with" in apart.output) == (1, True)
        stopped = await call("stop", "--why", "enough", *urls)
        assert stopped.output.count("ended (enough)") == 2


async def test_what_cannot_be_reached_or_read_is_said_in_one_line(tmp_path: Path) -> None:
    gone = await call("status", "--url", "http://127.0.0.1:9")
    assert gone.exit_code == 1
    said = "--url http://127.0.0.1:9: no gateway answers: "
    assert gone.output.startswith(said)
    bare = await call("status", "--url", "127.0.0.1:8080")
    said = "--url 127.0.0.1:8080: an address begins with http://, as http://127.0.0.1:8080\n"
    assert (bare.exit_code, bare.output) == (2, said)
    file = tmp_path / "other.toml"
    file.write_text("[policy]\nname = 'x'\n")
    assert (await call("start", "--file", str(file))).exit_code == 2
    assert (await call("weights", "candidate")).exit_code == 2


async def test_a_file_is_checked_before_a_gateway_hears_of_it(tmp_path: Path) -> None:
    """Nobody listens at port 9: what is said is about the file."""
    missing = await call("start", "--file", "nope.toml", "--url", "http://127.0.0.1:9")
    assert (missing.exit_code, missing.output) == (2, "--file nope.toml: file not found\n")
    file = tmp_path / "wrong.toml"
    file.write_text('[experiment]\nname = "x"\narms = [{ name = "control" }]\n')
    wrong = await call("start", "--file", str(file), "--url", "http://127.0.0.1:9")
    assert wrong.exit_code == 2
    assert wrong.output.startswith(f"--file {file}: experiment")


async def test_power_reads_a_journal_and_says_how_long(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    line = {"kind": "generate", "outcome": "success"}
    rows = [
        line | {"received_unix": 1.8e9 + i, "session": f"s{i // 4}", "partition": "good" if i % 9 else "slow_ttft"}
        for i in range(3000)
    ]
    torn = b'{"kind":"generate","outco'  # of a process that was killed, and started again
    path.write_bytes(torn + b"\n" + b"".join(orjson.dumps(row) + b"\n" for row in rows))
    found = await call("power", "--difference", "0.02", "--journal", str(path))
    assert found.exit_code == 0, found.output
    assert "1.0 requests a second, attainment 88.9%, 4.0 requests a session" in " ".join(found.output.split())
    for design in ("split, side by side", "split, swinging", "partition", "switchback"):
        assert design in found.output


async def test_what_power_cannot_work_with_is_named(tmp_path: Path) -> None:
    other = tmp_path / "gateway.log"
    other.write_text("2026-11-30 10:03:58,370 INFO forebay: replica a:1: in rotation\n")
    known = ("--rate", "20", "--attainment", "0.9")
    for asked, line in (
        ((), "give --journal, or --rate and --attainment"),
        (("--rate", "20", "--attainment", "93"), "attainment 93: a share above 0 and below 1 would be right"),
        (("--rate", "0", "--attainment", "0.9"), "rate 0: more than 0 requests a second would be right"),
        ((*known, "--share", "1"), "--share 1: above 0 and below 1 would be right"),
        ((*known, "--slice-s", "10"), "--wash-s 20: 0 or more and below --slice-s, which is 10, would be right"),
        (("--journal", "none.jsonl"), "--journal none.jsonl: cannot be read: No such file or directory"),
        (("--journal", str(other)), f"--journal {other}: is no journal of a gateway: no line of it tells a request"),
    ):
        wrong = await call("power", "--difference", "0.02", *asked)
        assert (wrong.exit_code, wrong.output) == (2, f"{line}\n")
    assert (await call("power", "--difference", "2", *known)).exit_code == 2
