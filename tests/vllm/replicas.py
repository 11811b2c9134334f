"""Two real vLLM replicas on this machine's CPU, started and broken by the scripts in FOREBAY_VLLM_DIR.

Without VLLM_PYTHON the environment is installed once into `.vllm-venv` of the checkout (about two minutes), without
MODEL the small random-weight model is made in `model-tiny`; git ignores both.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import httpx

from loadtests.ports import run_of_ports
from tests.serving import PLAIN, metric, wait_for

FLAGS = "--enable-auto-tool-choice --tool-call-parser hermes"
CHECKOUT = Path(__file__).resolve().parents[2]


uncaptured: Callable[[], AbstractContextManager[None]] = nullcontext  # conftest sets it to pytest's own


def say(text: str) -> None:
    """Progress and measurements on the terminal, past pytest's capture: these steps take minutes."""
    with uncaptured():
        print(f"\n[vllm] {text}", file=sys.stderr, flush=True)


class Replicas:
    """`urls[i]` is replica i; `scripted` says whether they are ours to break."""

    def __init__(self, urls: list[str], scripts: Path | None = None, env: dict[str, str] | None = None) -> None:
        self.urls = urls
        self.scripts = scripts
        self.env = env or {}
        self.extra = ""

    @property
    def scripted(self) -> bool:
        return self.scripts is not None

    def script(self, *arguments: str) -> None:
        assert self.scripts is not None
        env = {**os.environ, **self.env, "EXTRA": self.extra}
        done = subprocess.run([str(self.scripts / "serve.sh"), *arguments], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self, extra: str = "") -> None:
        """Starts those that do not run; `extra` are flags for the ones started now."""
        self.extra = f"{FLAGS} {extra}"
        begun = time.monotonic()
        self.script("start", str(len(self.urls)))
        say(f"replicas ready after {time.monotonic() - begun:.0f} s {extra}")

    def all_alive(self) -> None:
        """Brings back what an earlier test killed, and waits until nothing runs."""
        ended = [i for i in range(len(self.urls)) if not self.healthy(i)]
        if self.scripted and ended:
            for i in ended:
                self.script("stop", str(i))  # what is left of it
            self.start()
        for i in range(len(self.urls)):
            self.wait_idle(i)

    def pid(self, i: int) -> int:
        return int((Path(self.env["RUN_DIR"]) / f"replica-{i}.pid").read_text())

    def sigterm(self, i: int) -> None:
        """Asks replica i to end, without waiting."""
        os.kill(self.pid(i), signal.SIGTERM)

    def gone(self, i: int) -> bool:
        return not self.healthy(i)

    def healthy(self, i: int) -> bool:
        try:
            return httpx.get(f"{self.urls[i]}/health", timeout=30, verify=PLAIN).status_code == 200
        except httpx.HTTPError:
            return False

    def running(self, i: int) -> float:
        return metric(self.urls[i], "vllm:num_requests_running")

    def generated(self, i: int) -> float:
        return metric(self.urls[i], "vllm:generation_tokens_total")

    def wait_idle(self, i: int) -> None:
        wait_for(lambda: self.running(i) == 0, f"replica {i} idle")

    def index(self, name: str) -> int:
        """Replica number of what `x-forebay-replica` says."""
        return next(i for i, url in enumerate(self.urls) if url.removeprefix("http://") in name)


def scripted(scripts: Path) -> Replicas:
    """Installs what is missing and prepares two replicas on free ports; `start` starts them."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        venv = CHECKOUT / ".vllm-venv"
        python = str(venv / "bin" / "python")
        if not (venv / ".complete").exists():
            say(f"installing vLLM for CPU into {venv}: about two minutes and 2.5 GB, once")
            subprocess.run(
                [str(scripts / "install.sh"), str(venv)], check=True, env={**os.environ, "PYTHON": sys.executable}
            )
            (venv / ".complete").touch()
    model = os.environ.get("MODEL")
    if not model:
        model = str(CHECKOUT / "model-tiny")
        if not (CHECKOUT / "model-tiny" / "config.json").exists():
            say(f"making the model {model}")
            subprocess.run([python, str(scripts / "make_tiny_model.py"), model], check=True)
    base = run_of_ports(2)  # serve.sh wants consecutive ones
    env = {"VLLM_PYTHON": python, "MODEL": model, "RUN_DIR": str(CHECKOUT / "vllm-run"), "BASE_PORT": str(base)}
    env["WAIT"] = os.environ.get("WAIT", "600")  # a machine with other work on it takes minutes to start them
    return Replicas([f"http://127.0.0.1:{base + i}" for i in range(2)], scripts, env)
