"""Other people's load generators through the gateway, unchanged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from loadtests import demo
from loadtests.playground import Playground
from tests.loadtests.on_wire import PATIENT
from tests.serving import metric, wait_for

SCRIPTS = Path(__file__).resolve().parents[2] / "loadtests" / "scripts"


def test_locust_runs_its_script_against_the_gateway_without_a_failure() -> None:
    """Ended by a signal, as by an operator: in seconds of its own a busy machine might not come to one answer."""
    with Playground(demo.replica_settings(), 2, PATIENT) as ground:
        program = [
            sys.executable, "-m", "locust", "-f", str(SCRIPTS / "locustfile.py"), "--headless", "-u", "3", "-r", "3",
            "--host", ground.url, "--json", "--only-summary",
        ]  # fmt: skip
        environ = {**os.environ, "FOREBAY_MAX_TOKENS": "8"}
        with subprocess.Popen(
            program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        ) as locust:
            try:
                # of each of three users one answer may not have been counted yet
                wait_for(lambda: metric(ground.url, "forebay_requests_total", outcome="success") >= 6, "they chat")
            finally:
                locust.send_signal(signal.SIGTERM)
                told, errors = locust.communicate(timeout=120)
    assert locust.returncode == 0, told + errors
    stats = {row["name"]: row for row in json.loads(told)}
    assert stats["chat"]["num_requests"] >= 3
    assert [row["num_failures"] for row in stats.values()] == [0] * len(stats)
    assert stats["TTFT"]["num_requests"] == stats["chat"]["num_requests"]
    assert stats["TTFT"]["total_response_time"] <= stats["chat"]["total_response_time"]


def test_the_k6_script_asks_for_what_the_gateway_serves() -> None:
    """k6 is no Python program and not everywhere; the script is read for the paths and checks it relies on."""
    script = (SCRIPTS / "k6.js").read_text()
    for needed in ("/v1/chat/completions", "/v1/models", "data: [DONE]", "constant-arrival-rate", "dropped_iterations"):
        assert needed in script
