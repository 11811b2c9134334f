"""`forebay replay` and its senders, end to end against a scripted server."""

from __future__ import annotations

import asyncio
import json
import multiprocessing.context
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadtests import cli, quality, results, senders
from loadtests.client import Client, Target
from loadtests.drive import Behaviour, Clock, Driver, WireRequest
from loadtests.record import Record
from loadtests.requests import Shape
from loadtests.schedule import Row, Schedule
from loadtests.senders import LiveRun, SenderError, share_of, workers_for
from loadtests.sustain import verdict
from policies.model import ServiceClass
from policies.objectives import Partition
from tests.loadtests.scripted import Call, full_answer, scripted, until

CLASSES = {"interactive": ServiceClass("interactive", ttft_s=120.0, tpot_s=120.0)}


async def serve(call: Call) -> None:
    if call.path == "/v1/models":
        await call.plain(200, {"data": [{"id": "tiny", "max_model_len": 8192}]})
    elif call.path.startswith("/v1/"):
        await full_answer(call, cached=5)
    else:
        await call.plain(404, {"detail": "Not Found"})


def rows(n: int) -> tuple[Row, ...]:
    return tuple(Row(i, 0.01 * i, 10, 2, (i,), session=f"s{i % 5}") for i in range(n))


async def test_two_senders_send_every_row_once_with_one_clock() -> None:
    schedule = Schedule(rows(30), 0.5, 120.0, 512, CLASSES)
    async with scripted(serve) as server:
        live = LiveRun(schedule, server.url, Shape("tiny"), workers=2)
        seen: list[senders.Progress] = []
        got = await asyncio.to_thread(senders.run, live, seen.append)
        sent = sorted(int(c.headers["x-request-id"].removeprefix("run-")) for c in server.calls)
    assert sent == list(range(30))
    assert [r.id for r in got.records] == list(range(30))
    assert {r.partition for r in got.records} == {Partition.GOOD}
    assert (got.sustained.due, got.sustained.processes) == (30, 2)


async def test_records_beyond_the_buffer_of_a_pipe_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender watches its pipe for the end of its parent, and must still wait until all it says is taken."""
    pipe = multiprocessing.context.BaseContext.Pipe

    def narrow(*given: Any) -> Any:
        ours, theirs = pipe(*given)
        with socket.socket(fileno=os.dup(theirs.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return ours, theirs

    monkeypatch.setattr(multiprocessing.context.BaseContext, "Pipe", narrow)
    schedule = Schedule(tuple(Row(i, 0.0, 10, 600, (i,)) for i in range(80)), 0.5, 120.0, 512, CLASSES)
    async with scripted(serve) as server:
        live = LiveRun(schedule, server.url, Shape("tiny"), Behaviour(keep_text_share=1.0))
        got = await asyncio.to_thread(senders.run, live, lambda _: time.sleep(0.3))  # a parent that is slow to read
    assert [r.text for r in got.records] == ["x" * 600] * 80


def test_sessions_stay_with_one_sender_and_nothing_is_sent_twice() -> None:
    parts = [share_of(rows(50), worker, 3) for worker in range(3)]
    assert sorted(row.id for part in parts for row in part) == list(range(50))
    owners: dict[str | None, set[int]] = {}
    for worker, part in enumerate(parts):
        for row in part:
            owners.setdefault(row.session, set()).add(worker)
    assert all(len(workers) == 1 for workers in owners.values())


def test_more_senders_only_when_the_events_need_them_and_cores_are_there() -> None:
    quiet = Schedule((Row(0, 0.0, 10, 100, (1,)),), 10.0, 10.0, 512, CLASSES)
    busy = Schedule(tuple(Row(i, 0.0, 10, 2_000, (1,)) for i in range(100)), 10.0, 0.0, 512, CLASSES)
    assert (workers_for(quiet, True, 16), workers_for(busy, True, 16), workers_for(busy, False, 16)) == (1, 6, 1)
    assert workers_for(busy, True, 2) == 1


async def test_a_slow_generator_gets_invalid_never_a_better_number() -> None:
    def slow_build(row: Row) -> WireRequest:
        time.sleep(0.05)  # blocks the sending loop, as tokenising would
        return Shape("tiny").build(schedule, row)

    schedule = Schedule(rows(20), 0.2, 20.0, 512, CLASSES)
    async with scripted(serve) as server:
        clock = Clock(time.perf_counter())
        driver = Driver(schedule, slow_build, Client(Target.parse(server.url), clock.now), clock)
        await driver.run()
    found = verdict([driver.sustained], 20.0)
    assert any(reason.startswith("lag p99") for reason in found.reasons)


async def test_a_sender_that_cannot_work_says_why() -> None:
    schedule = Schedule(rows(1), 0.5, 1.0, 512, CLASSES)
    live = LiveRun(schedule, "http://127.0.0.1:9", Shape("tiny"))
    broken = replace(live, url="nonsense")
    with pytest.raises(SenderError, match="BadUrlError"):
        await asyncio.to_thread(senders.run, broken)


async def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    check = tmp_path / "check.py"
    check.write_text("def has_x(answer, row):\n    return answer == 'x' * row['output_tokens']\n")
    async with scripted(serve) as server:
        arguments = [
            "replay", "--url", server.url, "--workload", "unique", "--window", "1", "--load", "2",
            "--objective", "ttft=120s,tpot=120s", "--drain", "120", "--out", str(tmp_path / "run"), "--check",
            f"{check}:has_x", "--name", "scripted",
        ]  # fmt: skip
        result = await asyncio.to_thread(CliRunner().invoke, cli.build(["replay"]), arguments)
        asked = [c for c in server.calls if c.path == "/v1/chat/completions"]
    summary = results.read(tmp_path / "run")
    (run,) = summary["runs"]
    # on a machine too busy to send in time the verdict is invalid and says so; the counts hold in either case
    assert result.exit_code == (0 if run["verdict"] == "valid" else 1), result.output
    assert run["outcomes"]["good"] == run["offered"] == len(asked) > 0
    assert run["answer_check"]["passed"] == run["offered"]
    assert run["policy"] == "scripted"
    assert summary["provenance"]["server"]["models"] == [{"id": "tiny", "max_model_len": 8192}]
    lines = (tmp_path / "run" / "requests.jsonl").read_text().splitlines()
    assert len(lines) == run["offered"] + sum(not json.loads(line)["counted"] for line in lines)
    assert (tmp_path / "run" / "schedule.jsonl.gz").is_file()


@pytest.mark.parametrize(("more", "says"), [
    (["--workload", "nothing"], "--workload 'nothing'"),
    (["--workload", "chat", "--retries", "often"], "--retries 'often': none or official would be right"),
    (["--workload", "chat", "--url", "127.0.0.1:1"], "expected http://host:port"),
    (["--workload", "chat", "--check", "x.py"], "--check 'x.py': FILE.py:function would be right"),
    (["--workload", "chat"], "--url http://127.0.0.1:9: nobody answers there; check that it is up"),
])  # fmt: skip
def test_bad_usage_is_one_line_and_status_2(more: list[str], says: str, tmp_path: Path) -> None:
    arguments = ["replay", "--url", "http://127.0.0.1:9", "--window", "1", "--out", str(tmp_path), *more]
    result = CliRunner().invoke(cli.build(["replay"]), arguments)
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize(("key", "says"), [
    (None, "answered 401 at /v1/models; no key was sent: the key of a client is read from the environment variable"),
    ("sk-wrong", "answered 401 at /v1/models; the key in FOREBAY_API_KEY is not taken"),
])  # fmt: skip
async def test_a_server_that_wants_a_key_is_said_to(
    key: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keyed(call: Call) -> None:
        await call.plain(401, {"error": {"message": "m", "type": "t", "code": "no_key"}})

    monkeypatch.delenv("FOREBAY_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("FOREBAY_API_KEY", key)
    async with scripted(keyed) as server:
        arguments = [
            "replay", "--url", server.url, "--workload", "chat", "--window", "1", "--out", str(tmp_path / "run"),
        ]  # fmt: skip
        result = await asyncio.to_thread(CliRunner().invoke, cli.build(["replay"]), arguments)
    assert result.exit_code == 2
    assert f"forebay replay: --url {server.url}: {says}" in result.stderr
    assert "sk-wrong" not in result.output


def test_an_answer_check_that_raises_is_not_passed_and_is_named() -> None:
    def check(answer: str, row: dict[str, object]) -> bool:
        return bool(row["nothing"])

    record = Record(0, complete=True, text="x")
    told = quality.judge(check, [record])
    assert (told["checked"], told["passed"], told["errors"]) == (1, 0, {"KeyError": 1})


async def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    """The senders ignore the signal; they leave because their pipe closes."""
    async with scripted(serve) as server:
        program = [
            sys.executable, "-m", "loadtests.cli", "replay", "--url", server.url, "--workload", "unique",
            "--window", "60", "--out", str(tmp_path),
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True
        )
        async with asyncio.timeout(120):
            while not any(c.path == "/v1/chat/completions" for c in server.calls):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            os.killpg(process.pid, signal.SIGINT)
            _, errors = await process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in errors
    await until(lambda: members(process.pid) == [])


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = stat.read_text().partition(" ")
        except OSError:
            continue
        state, _, pgrp = rest.rpartition(") ")[2].split()[:3]
        if int(pgrp) == group and state != "Z":
            found.append(int(pid))
    return found
