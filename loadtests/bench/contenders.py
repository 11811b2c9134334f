"""Who is measured: our gateway under several policies and, beside it in the same run, vllm-router.

vllm-router (Rust, from the package index) is the router of the vLLM project. It lives in a virtual environment
of its own, made on first use, since its dependencies are not ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

ROUTER_VERSION = "0.1.17"
ALL_ON = "forebay (all on)"
FOREBAY = [sys.executable, "-c", "from loadtests.cli import main; main()"]


@dataclass(frozen=True, slots=True)
class Contender:
    """`argv(port, replica URLs)` starts it; it is ready when `ready_path` answers 200."""

    name: str
    argv: Callable[[int, Sequence[str]], list[str]]
    ready_path: str = "/ready"


def forebay(policy: str, workers: int = 1, config: Path | None = None) -> Contender:
    """Our gateway; a bare policy dispatches at once, `forebay` has admission, late binding and pacing on."""
    several = ["--workers", str(workers)] if workers > 1 else []
    more = [*several, "--config", str(config)] if config is not None else several

    def argv(port: int, urls: Sequence[str]) -> list[str]:
        replicas = [part for url in urls for part in ("--replica", url)]
        return [*FOREBAY, "serve", "--host", "127.0.0.1", "--port", str(port), "--policy", policy, *more, *replicas]

    name = ALL_ON if policy == "forebay" else f"forebay {policy}"
    return Contender(f"{name} x{workers}" if several else name, argv)


def vllm_router(policy: str, executable: Path, metrics_port: int) -> Contender:
    def argv(port: int, urls: Sequence[str]) -> list[str]:
        return [
            str(executable),
            *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)),
            *("--policy", policy, "--log-level", "warning", "--worker-urls", *urls),
        ]

    return Contender(f"vllm-router {policy}", argv, ready_path="/health")


def router_executable(console: Console) -> Path:
    """Path of vllm-router: $FOREBAY_VLLM_ROUTER, or the environment in the user's cache, which is made if missing."""
    given = os.environ.get("FOREBAY_VLLM_ROUTER")
    if given:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    venv = cache / "forebay" / f"vllm-router-{ROUTER_VERSION}"
    executable = venv / "bin" / "vllm-router"
    if not executable.exists():
        with console.status(f"installing vllm-router {ROUTER_VERSION} into {venv} (once, about a minute)"):
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
            pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
            subprocess.run([*pip, f"vllm-router=={ROUTER_VERSION}"], check=True)
    return executable
