"""A gateway as an operator runs it: real signals, a file that is written again and again, a disk that fills up."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from loadtests.bench.contenders import FOREBAY
from loadtests.ports import free_ports
from tests.scripted_replica import ScriptedReplica
from tests.serving import PLAIN, Gateway, chat, gateway, metric, post, stream, streaming, unhurried, wait_for

CHAT = "/v1/chat/completions"


def ready(front: Gateway) -> int:
    return httpx.get(f"{front.url}/ready", timeout=30, verify=PLAIN).status_code


def ended(front: Gateway) -> int | None:
    return front.server.process.poll()


def refused(front: Gateway) -> bool:
    try:
        httpx.get(f"{front.url}/ready", timeout=30, verify=PLAIN)
    except httpx.ConnectError:
        return True
    return False


def test_sigterm_lets_streams_finish_and_then_it_ends_by_itself(
    replica: ScriptedReplica, go_on: threading.Event, tmp_path: Path
) -> None:
    with (
        gateway([replica.url], tmp_path, policy="round_robin", config="[timeouts]\nidle_s = 120.0\n") as front,
        streaming(front.url, chat("wait")) as opened,
    ):
        events = iter(opened)
        next(events)
        front.server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: ready(front) == 503, "it is not ready any more")
        newcomer = post(front.url, chat("late"))
        assert (newcomer.status_code, newcomer.json()["error"]["code"]) == (503, "draining")
        assert int(newcomer.headers["retry-after"]) >= 1
        assert ended(front) is None
        go_on.set()
        assert list(events)
        assert opened.done
        wait_for(lambda: ended(front) is not None, "it has ended")
        assert ended(front) == 0


def test_a_second_sigterm_ends_it_at_once_and_says_so_to_its_clients(replica: ScriptedReplica, tmp_path: Path) -> None:
    config = "[timeouts]\nidle_s = 120.0\n[listen]\ndrain_s = 120.0\n"
    with (
        gateway([replica.url], tmp_path, policy="round_robin", config=config) as front,
        streaming(front.url, chat("wait")) as opened,
    ):
        events = iter(opened)
        next(events)
        front.server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: ready(front) == 503, "it is not ready any more")
        front.server.process.send_signal(signal.SIGTERM)
        list(events)
        assert opened.error is not None
        assert opened.error["code"] == "draining"
        assert not opened.done
        wait_for(lambda: ended(front) is not None, "it has ended")


def test_a_storm_of_sighups_over_good_and_bad_files_costs_no_request(replica: ScriptedReplica, tmp_path: Path) -> None:
    """Each signal reads whatever is there: every request is answered by one whole configuration or another."""
    with gateway([replica.url], tmp_path, policy="round_robin", config="[limits]\nheld_requests = 100\n") as front:
        (file,) = tmp_path.glob("gateway-*.toml")

        def write(text: str) -> None:
            file.with_suffix(".new").write_text(unhurried(text))
            file.with_suffix(".new").replace(file)
            front.server.process.send_signal(signal.SIGHUP)

        stop = threading.Event()

        def client(n: int) -> list[bool]:
            fine = []
            while not stop.is_set():
                fine.append(stream(front.url, chat(f"{n}")).done)
            return fine

        with ThreadPoolExecutor(3) as pool:
            jobs = [pool.submit(client, n) for n in range(3)]
            for i in range(300):
                write(f"[limits]\nheld_requests = {100 + i}\n" if i % 3 else "[limits]\nheld_requests = 'many'\n")
            write("[limits]\nheld_requests = 'many'\n")
            wait_for(lambda: status(front)["refused"], "the last file is refused")
            assert status(front)["refused"]["errors"] == ['limits.held_requests = "many": must be a whole number']
            assert status(front)["refused"]["why"] == "SIGHUP"
            write("[limits]\nheld_requests = 777\n")
            wait_for(lambda: config(front, "limits")["held_requests"] == 777, "the last good file counts")
            stop.set()
            answers = [fine for job in jobs for fine in job.result(timeout=60)]
        assert answers
        assert all(answers)
        assert status(front)["refused"] is None
        assert metric(front.url, "forebay_config_refused_total") >= 1
        wait_for(lambda: metric(front.url, "forebay_replica_in_flight") == 0, "nothing is left over")
        assert "Traceback" not in front.server.log.read_text()


def status(front: Gateway) -> dict[str, Any]:
    made: dict[str, Any] = httpx.get(f"{front.url}/admin/v1/status", timeout=30, verify=PLAIN).json()
    return made


def config(front: Gateway, table: str) -> dict[str, Any]:
    made: dict[str, Any] = httpx.get(f"{front.url}/admin/v1/config/{table}", timeout=30, verify=PLAIN).json()
    return made


def test_a_disk_that_fills_up_costs_journal_lines_and_no_request(replica: ScriptedReplica, tmp_path: Path) -> None:
    """A limit on the size of files takes the place of a full disk: writes end short, then fail."""
    journal = tmp_path / "journal.jsonl"
    with gateway([replica.url], tmp_path, policy="round_robin", config=f'[journal]\npath = "{journal}"\n') as front:
        pid = front.server.process.pid
        assert stream(front.url, chat("first")).done
        wait_for(lambda: metric(front.url, "forebay_journal_lines_total") == 1, "its line is written")
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (journal.stat().st_size + 100, before[1]))
        for n in range(5):
            assert stream(front.url, chat(f"full {n}")).done
        wait_for(lambda: metric(front.url, "forebay_journal_dropped_total") == 5, "five lines are dropped")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        assert stream(front.url, chat("last")).done
        wait_for(lambda: metric(front.url, "forebay_journal_lines_total") == 2, "it writes again")
    lines = journal.read_text().splitlines()
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    assert [line["outcome"] for line in whole] == ["success", "success"]


def test_a_port_in_use_is_one_line_and_exit_status_1(tmp_path: Path) -> None:
    with gateway([], tmp_path, ready=False) as front:
        port = front.url.rsplit(":", 1)[1]
        for workers in ("1", "2"):
            argv = [*FOREBAY, "serve", "--replica", "http://127.0.0.1:9", "--port", port, "--workers", workers]
            second = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
            assert second.returncode == 1
            assert second.stdout == ""
            assert second.stderr == (
                f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --host and --port\n"
            )
        assert httpx.get(f"{front.url}/health", timeout=30, verify=PLAIN).status_code == 200


def test_it_starts_before_its_replicas_and_takes_them_in_when_they_come(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    quick = "[health]\nprobe_interval_s = 0.1\n"
    with gateway([f"http://127.0.0.1:{port}"], tmp_path, policy="round_robin", config=quick, ready=False) as front:
        assert ready(front) == 503
        early = post(front.url, chat("early"))
        assert (early.status_code, early.json()["error"]["code"]) == (503, "no_replica")
        assert int(early.headers["retry-after"]) >= 1
        argv = [*FOREBAY, "replica", "--port", str(port), "--model", "tiny", "--time-scale", "20"]
        late = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ})
        try:
            wait_for(lambda: ready(front) == 200, "the replica is taken in")
            assert stream(front.url, chat("now")).done
        finally:
            late.terminate()
            late.wait(60)
