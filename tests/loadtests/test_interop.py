"""Other people's load generators through the gateway, unchanged."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

from loadtests import demo
from loadtests.playground import Playground
from tests.loadtests.on_wire import PATIENT

SCRIPTS = Path(__file__).resolve().parents[2] / "loadtests" / "scripts"


def test_locust_runs_its_script_against_the_gateway_without_a_failure(tmp_path: Path) -> None:
    with Playground(demo.replica_settings(), 2, PATIENT) as ground:
        done = subprocess.run(
            [
                sys.executable, "-m", "locust", "-f", str(SCRIPTS / "locustfile.py"), "--headless", "-u", "3",
                "-r", "3", "-t", "6s", "--host", ground.url, "--csv", str(tmp_path / "run"), "--only-summary",
            ],
            capture_output=True, text=True, timeout=120, env={**os.environ, "FOREBAY_MAX_TOKENS": "8"}, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "run_stats.csv").open() as lines:
        stats = {row["Name"]: row for row in csv.DictReader(lines)}
    assert int(stats["chat"]["Request Count"]) >= 3
    assert int(stats["Aggregated"]["Failure Count"]) == 0
    assert float(stats["TTFT"]["Average Response Time"]) <= float(stats["chat"]["Average Response Time"])
    assert int(stats["TTFT"]["Request Count"]) == int(stats["chat"]["Request Count"])


def test_the_k6_script_asks_for_what_the_gateway_serves() -> None:
    """k6 is no Python program and not everywhere; the script is read for the paths and checks it relies on."""
    script = (SCRIPTS / "k6.js").read_text()
    for needed in ("/v1/chat/completions", "/v1/models", "data: [DONE]", "constant-arrival-rate", "dropped_iterations"):
        assert needed in script
