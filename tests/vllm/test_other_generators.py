"""guidellm and aiperf, unchanged, through the gateway in front of real replicas.

They are installed once into `.interop-venv` of the checkout, which borrows torch and transformers from the environment
of the replicas: 0.3 GB instead of 6. aiperf takes a tokenizer from a cache in the hub's layout only, so the test
lays the model's own files out that way.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serving import Gateway, wait_for
from tests.vllm.replicas import CHECKOUT, Replicas, say

PINNED = ("guidellm==0.8.1", "aiperf==0.13.0")
FAILED = ("error", "truncated", "rejected", "expired")
# aiperf is a dozen processes that find each other; on a busy machine that takes them longer than they wait for it
WAITS = ("REGISTRATION", "START", "PROFILE_START", "COMMAND_RESPONSE")
UNHURRIED = {f"AIPERF_SERVICE_{name}_TIMEOUT": "300" for name in WAITS} | {
    "AIPERF_SERVICE_REGISTRATION_MAX_ATTEMPTS": "300",
    "AIPERF_SERVICE_HEARTBEAT_MISSED_THRESHOLD": "60",
}
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="session")
def programs(started: Replicas) -> Path:
    """The folder of the two programs."""
    if not started.scripted:
        pytest.skip("replicas given by FOREBAY_VLLM_URLS come without the environment that these programs borrow from")
    venv = CHECKOUT / ".interop-venv"
    if not (venv / ".complete").exists():
        say(f"installing {' and '.join(PINNED)} into {venv}: about three minutes, once")
        python = started.env["VLLM_PYTHON"]
        subprocess.run([python, "-m", "venv", "--clear", str(venv)], check=True)
        place = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        ours, theirs = (
            subprocess.run([p, "-c", place], check=True, capture_output=True, text=True).stdout.strip()
            for p in (str(venv / "bin" / "python"), python)
        )
        (Path(ours) / "replicas.pth").write_text(theirs + "\n")
        subprocess.run(
            [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *PINNED],
            check=True,
        )
        (venv / ".complete").touch()
    return venv / "bin"


def run(command: list[str], cwd: Path, **environ: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def assert_all_served(front: Gateway) -> None:
    """A program that has its last token may hang up before the end of the body, which counts as its leaving."""
    wait_for(lambda: front.metric("forebay_requests_total") >= 6, "six requests are counted")
    failed = {outcome: front.metric("forebay_requests_total", outcome=outcome) for outcome in FAILED}
    assert failed == dict.fromkeys(FAILED, 0.0)


def test_guidellm_runs_unchanged_through_the_gateway(
    breakable: Replicas, programs: Path, front: Gateway, tmp_path: Path
) -> None:
    model = Path(breakable.env["MODEL"]).resolve()
    run(
        [
            str(programs / "guidellm"), "run", "--backend", f"kind=openai_http,target={front.url},model=tiny",
            "--tokenizer", f"kind=huggingface_auto,model={model}", "--profile", "kind=constant,rate=2",
            "--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=8",
            "--constraint", "kind=max_requests,count=6", "--disable-console-interactive",
        ],
        tmp_path,
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    # it may count five: it announces its end before it hands over the sixth, and leaves where its poll falls between
    # (scheduler/worker_group.py, `received_callback` and `request_updates`). What was served the gateway counts
    state = benchmark["scheduler_state"]
    assert (state["created_requests"], state["errored_requests"], state["cancelled_requests"]) == (6, 0, 0)
    served = benchmark["requests"]["successful"]
    assert served
    assert all(request["time_to_first_token_ms"] > 0.0 for request in served)
    assert_all_served(front)


def test_aiperf_runs_unchanged_through_the_gateway(
    breakable: Replicas, programs: Path, front: Gateway, tmp_path: Path
) -> None:
    repository = tmp_path / "hub" / "models--local--tiny"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(breakable.env["MODEL"]) / name, snapshot)
    run(
        [
            str(programs / "aiperf"), "profile", "-m", "tiny", "--url", front.url, "--endpoint-type", "chat",
            "--streaming", "--tokenizer", "local/tiny", "--request-rate", "3", "--request-count", "6",
            "--synthetic-input-tokens-mean", "100", "--output-tokens-mean", "8", "--ui", "none",
        ],
        tmp_path,
        HF_HOME=str(tmp_path),
        **UNHURRIED,
    )  # fmt: skip
    (found,) = tmp_path.rglob("profile_export_aiperf.json")
    result = json.loads(found.read_text())
    assert (result["request_count"]["avg"], result["error_summary"], result["is_complete"]) == (6.0, [], True)
    assert result["time_to_first_token"]["count"] == 6
    assert_all_served(front)
