"""Null replica and load client: the compiled and the Python version do the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from loadtests.bench import load, programs
from loadtests.bench.processes import NotReadyError, Server
from loadtests.ports import free_ports

PYTHON = {name: [sys.executable, "-m", f"loadtests.bench.{name}"] for name in ("null_replica", "load_client")}


@pytest.fixture(params=["compiled", "python"])
def replica_and_client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, list[str]]]:
    """Port of a running null replica (an event every 1 ms) and the command of the load client."""
    if request.param == "compiled":
        replica = programs.command("null_replica", tmp_path, Console())
        client = programs.command("load_client", tmp_path, Console())
    else:
        replica, client = PYTHON["null_replica"], PYTHON["load_client"]
    (port,) = free_ports(1)
    server = Server([*replica, "1000", str(port)], tmp_path / "replica.log")
    server.wait_ready(f"http://127.0.0.1:{port}/health")
    yield port, client
    server.stop()


def test_whole_answers_are_counted(replica_and_client: tuple[int, list[str]], tmp_path: Path) -> None:
    port, client = replica_and_client
    body = tmp_path / "body.json"
    body.write_bytes(load.chat_body(400_000, turns=8, max_tokens=2, stream=False))
    run = load.drive(client, port, body, connections=3, each=5)
    assert replace(run, seconds=0, p50_us=0, p99_us=0) == load.Run(15, 0, 0, "", 0, 0, 0)


def test_a_stream_has_its_role_event_and_one_event_for_each_token(
    replica_and_client: tuple[int, list[str]], tmp_path: Path
) -> None:
    port, client = replica_and_client
    body = tmp_path / "body.json"
    body.write_bytes(load.chat_body(60, turns=1, max_tokens=7, stream=True))
    run = load.drive(client, port, body, connections=4, each=2, stagger_us=100)
    assert (run.answers, run.events, run.errors) == (8, 8 * 8, 0)


def test_an_open_loop_sends_no_sooner_than_its_period_says(
    replica_and_client: tuple[int, list[str]], tmp_path: Path
) -> None:
    port, client = replica_and_client
    body = tmp_path / "body.json"
    body.write_bytes(load.chat_body(60, turns=1, max_tokens=2, stream=False))
    run = load.drive(client, port, body, connections=2, each=4, stagger_us=5_000, period_us=20_000)
    assert (run.answers, run.errors) == (8, 0)
    assert run.seconds >= 3 * 0.02 + 0.005


def test_a_refused_connect_is_an_error_and_not_an_answer(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    body = tmp_path / "body.json"
    body.write_bytes(load.chat_body(60, turns=1, max_tokens=2, stream=False))
    for client in (PYTHON["load_client"], programs.command("load_client", tmp_path, Console())):
        run = load.drive(client, port, body, connections=2, each=1)
        assert (run.answers, run.errors) == (0, 2)
        assert "refused" in run.first_error.lower() or "Connect call failed" in run.first_error


def test_without_a_compiler_the_python_version_runs_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "COMPILERS", ("no-such-compiler",))
    console = Console(record=True, width=200)
    assert programs.command("null_replica", tmp_path, console) == PYTHON["null_replica"]
    assert "no C compiler (no-such-compiler) found for null_replica" in console.export_text()


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    server = Server([sys.executable, "-c", "print('port 80 is taken'); raise SystemExit(3)"], tmp_path / "log")
    with pytest.raises(NotReadyError, match=r"status 3:\nport 80 is taken"):
        server.wait_ready("http://127.0.0.1:9/health", within_s=20)


def test_cpu_of_children_counts(tmp_path: Path) -> None:
    burn = "import time\nend = time.process_time() + 0.1\nwhile time.process_time() < end: pass\n"
    parent = (
        f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {burn!r}])\n"
        "print('done', flush=True); time.sleep(60)"
    )
    server = Server([sys.executable, "-c", parent], tmp_path / "log")
    try:
        while "done" not in server.log.read_text():
            assert server.process.poll() is None
        assert server.cpu_s() >= 0.1
        assert server.memory_bytes() > 1 << 20
    finally:
        server.stop()
