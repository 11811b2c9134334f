"""The demo and the playground under it: it measures, serves on, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys

import httpx
import pytest
from typer.testing import CliRunner

from loadtests import cli, demo, simulated
from loadtests.playground import Playground, PlaygroundError
from tests.loadtests.on_wire import PATIENT
from tests.loadtests.scripted import until
from tests.loadtests.test_replay import members


def test_the_schedule_is_the_same_for_both_arms_and_on_any_machine() -> None:
    one, two = demo.schedule_of(demo.QUICK), demo.schedule_of(demo.QUICK)
    assert one.sha256 == two.sha256
    assert demo.schedule_of(demo.QUICK, seed=1).sha256 != one.sha256
    assert {row.service_class for row in one.rows} == {"interactive"}


def test_the_gateway_judges_by_the_clients_objectives_in_its_faster_seconds() -> None:
    tables = demo.gateway_tables(demo.schedule_of(demo.QUICK))
    assert tables["classes"]["interactive"] == {"ttft_s": 0.75, "ttft_s_per_token": 0.0, "tpot_s": 0.03}


def test_a_playground_answers_starts_cold_and_ends() -> None:
    body = {"model": demo.MODEL, "messages": [{"role": "user", "content": "hello " * 400}], "max_tokens": 4}
    with Playground(demo.replica_settings(), 2, PATIENT | {"policy": {"name": "round_robin"}}) as ground:
        pids = [process.pid for process, _ in ground._children]
        cached = []
        for reset in (False, False, False, True):
            if reset:
                asyncio.run(demo.start_state(ground, "least_request"))
            answer = httpx.post(f"{ground.url}/v1/chat/completions", json=body, timeout=30.0, trust_env=False)
            assert answer.status_code == 200
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert httpx.get(f"{ground.url}/admin/policy", timeout=60, trust_env=False).json()["name"] == "least_request"
        assert len(asyncio.run(simulated.lag_counts(ground.replica_urls))) == 2
    # round robin: replica 0 cold, 1 cold, 0 warm; cold again after the reset
    assert [n > 0 for n in cached] == [False, False, True, False]
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("window", ["0", "-1"])
def test_a_window_without_time_is_named(window: str) -> None:
    result = CliRunner().invoke(cli.build(["demo"]), ["demo", "--exit", "--window", window])
    said = f"forebay demo: --window {window}: more than 0 seconds would be right\n"
    assert (result.exit_code, result.stderr) == (2, said)


def test_a_part_that_cannot_start_says_why_in_one_line() -> None:
    with (
        pytest.raises(PlaygroundError, match="gateway: ConfigError"),
        Playground(demo.replica_settings(), 1, {"policy": {"name": "no such policy"}}),
    ):
        pass


@pytest.mark.parametrize("moment", ["the start", "the load", "serving on"])
async def test_ctrl_c_is_clean_at_any_moment(moment: str) -> None:
    said = {"the start": "4 simulated replicas", "the load": "requests in", "serving on": "Ctrl-C stops everything"}
    window = "1" if moment == "serving on" else "60"  # so long that nothing else can come first
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-m", "loadtests.cli", "demo", "--window", window, "--seed", "1",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "COLUMNS": "160"},
    )  # fmt: skip
    assert process.stdout is not None
    output = ""
    async with asyncio.timeout(300):
        while said[moment] not in output:
            line = await process.stdout.readline()
            assert line, output
            output += line.decode()
        os.killpg(process.pid, signal.SIGINT)
        output += (await process.stdout.read()).decode()
        await process.wait()
    assert "Traceback" not in output
    # after the table the status is the verdict's, which depends on how busy this machine is
    assert process.returncode in ((0, 1) if moment == "serving on" else (130,))
    ports = re.findall(r"http://127\.0\.0\.1:(\d+)", output)
    await until(lambda: members(process.pid) == [] and not any(_answers(port) for port in ports))
    if moment == "serving on":
        assert "round_robin" in output
        assert "curl -N http://127.0.0.1:" in output


def _answers(port: str) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=2.0, trust_env=False)
    except httpx.HTTPError:
        return False
    return True
