"""What the commands say, and their exit status."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from gateway.cli import app

ROOT = Path(__file__).parents[2]
run = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke


@pytest.mark.parametrize("command", ["serve", "check"])
def test_help_has_an_example(command: str) -> None:
    answer = run(app, [command, "--help"])
    assert answer.exit_code == 0
    assert f"Example: forebay {command}" in answer.output


def test_check_says_each_mistake_in_a_line_and_exits_2(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text("[limits]\nmax_bdy_bytes = 1\n[policy]\nname = 3\n")
    answer = run(app, ["check", "--config", str(file)])
    assert answer.exit_code == 2
    assert answer.stderr.splitlines() == [
        "limits.max_bdy_bytes: unknown key; the nearest valid one is max_body_bytes",
        "policy.name = 3: must be text in quotes",
    ]


def test_check_of_a_valid_file_says_what_it_would_do() -> None:
    answer = run(app, ["check", "--config", str(ROOT / "deploy" / "gateway.toml")])
    assert answer.exit_code == 0
    assert "Configuration is valid" in answer.output
    assert "interactive, standard (default), batch" in answer.output


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            '[tenants.a]\nkeys_env = ["FOREBAY_TEST_UNSET"]\n',
            'tenants.a.keys_env[0] = "FOREBAY_TEST_UNSET": this environment variable is not set',
        ),
        (
            '[[replicas]]\nurl = "http://a:1"\nkey_env = "FOREBAY_TEST_UNSET"\n',
            'replicas[0].key_env = "FOREBAY_TEST_UNSET": this environment variable is not set',
        ),
        (
            '[metrics]\ntoken_env = "FOREBAY_TEST_UNSET"\n',
            'metrics.token_env = "FOREBAY_TEST_UNSET": this environment variable is not set',
        ),
        (
            '[redis]\nurl = "redis://a"\npassword_env = "FOREBAY_TEST_UNSET"\n',
            'redis.password_env = "FOREBAY_TEST_UNSET": this environment variable is not set',
        ),
        (
            '[journal]\npath = "/tmp"\n',
            'journal.path = "/tmp": is a folder; the path of a file would be right',
        ),
        (
            '[journal]\npath = "/gone/j.jsonl"\n',
            'journal.path = "/gone/j.jsonl": there is no folder /gone; make it, or name a file in one that is there',
        ),
        *(
            (
                f'[listen]\ntrusted_proxies = ["::1", "{odd}"]\n',
                f'listen.trusted_proxies[1] = "{odd}": must be one IP address, as 10.0.0.4; no name, port or network',
            )
            for odd in ("10.0.0.0/8", "proxy.local", "10.0.0.1:80", "")
        ),
        (
            '[redis]\nurl = "redis://a:6379/first"\n',
            'redis.url = "redis://a:6379/first": must end with the number of a database, as /0; "first" is none',
        ),
        (
            '[redis]\nurl = "redis://a:6379/-1"\n',
            'redis.url = "redis://a:6379/-1": must end with the number of a database, as /0; "-1" is none',
        ),
    ],
)
def test_check_finds_what_a_gateway_would_stumble_over(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    answer = run(app, ["check", "--config", str(file)])
    assert (answer.exit_code, answer.stderr) == (2, f"{line}\n")


@pytest.mark.parametrize(
    ("tenants", "count", "clients", "workers"),
    [
        (1, 1, "1 tenant with keys", "1; everything in one process"),
        (2, 3, "2 tenants with keys", "3, and a core that decides"),
    ],
)
def test_check_counts_tenants_and_workers(tmp_path: Path, tenants: int, count: int, clients: str, workers: str) -> None:
    file = tmp_path / "gateway.toml"
    keys = "".join(f'[tenants.t{i}]\nkeys_sha256 = ["{i:064x}"]\n' for i in range(tenants))
    file.write_text(f"workers.count = {count}\n{keys}")
    rows = [line.split(maxsplit=1) for line in run(app, ["check", "--config", str(file)]).output.splitlines() if line]
    shown = {row[0]: row[1].strip() for row in rows}
    assert (shown["clients"], shown["workers"]) == (clients, workers)


def test_check_says_where_replicas_come_from(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('[discovery.file]\npath = "r.toml"\n[discovery.kubernetes]\nselector = "app=vllm"\n')
    answer = run(app, ["check", "--config", str(file)])
    assert "those of r.toml; EndpointSlices with app=vllm" in answer.output


def test_check_says_where_it_would_listen_and_what_it_shares(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('listen.port = 8081\n[redis]\nurl = "redis://10.0.0.5:6379/0"\n')
    answer = run(app, ["check", "--config", str(file)])
    rows = {
        line.strip().partition("  ")[0]: line.strip().partition("  ")[2].strip() for line in answer.output.splitlines()
    }
    assert rows["listens on"] == "127.0.0.1:8081"
    assert rows["redis"].startswith("redis://10.0.0.5:6379/0, shared by")


def test_a_log_gets_each_row_on_a_line_that_ends_with_its_text(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    names = [f"http://vllm-{i}.a-long-name.example:8000" for i in range(9)]
    file.write_text(f"[discovery.dns]\nnames = {names}\n")
    answer = run(app, ["check", "--config", str(file)], env={"COLUMNS": "80"})
    lines = answer.output.splitlines()
    assert lines == [line.rstrip() for line in lines]
    (row,) = [line.split(maxsplit=1) for line in lines if line.startswith("  replicas ")]
    assert row == ["replicas", f"those of {', '.join(names)}"]


def test_serve_without_any_replica_says_what_is_missing() -> None:
    answer = run(app, ["serve"])
    assert answer.exit_code == 2
    assert answer.stderr == "there is no replica: give --replica URL, or --config FILE with a [[replicas]] table\n"


def test_serve_names_a_mistake_on_the_command_line_like_one_in_the_file() -> None:
    answer = run(app, ["serve", "--replica", "10.0.0.7:8000", "--policy", "robin"])
    assert answer.exit_code == 2
    first, second = answer.stderr.splitlines()
    assert first == 'replicas[0].url = "10.0.0.7:8000": must be a base URL, as http://10.0.0.7:8000'
    assert second.startswith('policy.name = "robin": must be one of forebay, round_robin')


def test_one_process_does_not_take_over_from_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_ONLY_CHECK", "1")  # as a supervisor asks the program that is installed now
    answer = run(app, ["serve", "--replica", "http://127.0.0.1:9", "--port", "0"])
    said = "workers.count = 1: one process cannot take over from several; stop this gateway and start it again\n"
    assert (answer.exit_code, answer.stderr) == (1, said)


def test_a_port_that_is_taken_is_one_line_and_exit_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        answer = run(app, ["serve", "--replica", "http://127.0.0.1:9", "--port", port])
    assert answer.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in answer.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_journal_that_cannot_be_opened_is_one_line_and_exit_1(tmp_path: Path, workers: str) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(f'[journal]\npath = "{tmp_path}/gone/journal.jsonl"\n')
    answer = run(app, ["serve", "--config", str(file), "--port", "0", "--workers", workers])
    assert answer.exit_code == 1
    told = f"there is no folder {tmp_path}/gone; make it, or name a file in one that is there"
    assert answer.stderr == f'journal.path = "{tmp_path}/gone/journal.jsonl": {told}\n'


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (os.ST_RDONLY, "lies on a file system that is read-only; mount a volume there"),
        (0, "may not be written by this user"),
    ],
)
def test_check_says_why_nothing_may_be_written_to_a_journal(
    flags: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(f'[journal]\npath = "{tmp_path}/j.jsonl"\n')
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write everywhere
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flags))
    answer = run(app, ["check", "--config", str(file)])
    assert (answer.exit_code, answer.stderr) == (2, f'journal.path = "{tmp_path}/j.jsonl": {why}\n')


WRITE_NOTHING = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as a root file system that is read-only, with nothing at /tmp
from gateway.cli import app
app(sys.argv[1:])
"""


@pytest.mark.parametrize(("command", "status"), [("serve", 1), ("check", 2)])
def test_several_processes_without_a_folder_to_meet_in_are_one_line(tmp_path: Path, command: str, status: int) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text("[listen]\nport = 0\n[workers]\ncount = 2\n")
    argv = [sys.executable, "-c", WRITE_NOTHING, command, "--config", str(file)]
    ran = subprocess.run(
        argv, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout) == (status, "")
    assert ran.stderr == (
        "workers.count = 2: its processes meet at a socket in a temporary folder, and none may be written to; "
        "mount a tmpfs at /tmp, or name a folder in TMPDIR\n"
    )
