"""What a reader needs to run it again, and to see that two runs are alike: code, machine, replica, command.

Engine and model facts are read from the replica (`/version`, `/v1/models`, labels of `vllm:cache_config_info`,
`/server_info` where the development routes are on), so that they say what runs and not what was meant to. What a
replica cannot say (driver, accelerator, model revision, tokenizer) comes from a facts file of the operator and is
kept apart. Host names, paths of home folders and anything that looks like a key are left out.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx

SCHEMA = "forebay.provenance/1"
LIBRARIES = ("forebay", "uvloop", "httptools", "orjson", "numpy", "scipy")
SECRET = re.compile(r"(sk-|key|token|secret|password|bearer)", re.IGNORECASE)
CACHE_LABELS = (
    "block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype", "gpu_memory_utilization",
    "kv_cache_size_tokens", "prefix_caching_hash_algo", "sliding_window", "cpu_offload_gb",
)  # fmt: skip
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class FactsError(ValueError):
    """A facts file that is no JSON object."""


def here(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """This machine, this code, this command."""
    return {
        "schema": SCHEMA,
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.argv if argv is None else argv),
        "code": code(),
        "python": platform.python_version(),
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "load_average_before": [round(x, 2) for x in os.getloadavg()],
        "clock": _read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "boot_id": _read("/proc/sys/kernel/random/boot_id"),
    }


def command_line(argv: Sequence[str]) -> str:
    """The command with every value that may be a secret replaced."""
    words, hide = [], False
    for i, word in enumerate(argv):
        text = Path(word).name if i == 0 else word
        if hide:
            text = "***"
        elif SECRET.search(text):
            text = re.sub(r"=.*", "=***", text) if "=" in text or text.startswith("-") else "***"
        hide = text.startswith("-") and "=" not in text and bool(SECRET.search(text))
        words.append(re.sub(r"//[^/@\s]+@", "//***@", text))
    return " ".join(words)


def code() -> dict[str, Any]:
    """Commit of the checkout that runs, and whether it differs from it; empty outside one."""
    root = Path(__file__).resolve().parent.parent
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit, "changed": changed}


async def replica(url: str, api_key: str | None = None) -> dict[str, Any]:
    """What one replica (or a gateway that passes these paths on) says of itself; unknown parts are left out."""
    facts: dict[str, Any] = {}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(headers=headers, timeout=5.0, trust_env=False) as client:
        version = await _json(client, f"{base}/version")
        if isinstance(version, dict):
            facts["version"] = version.get("version")
        models = await _json(client, f"{base}/v1/models")
        if isinstance(models, dict):
            facts["models"] = [
                {k: m[k] for k in ("id", "root", "parent", "max_model_len") if m.get(k) is not None}
                for m in models.get("data", ())
            ]
        metrics = await _text(client, f"{base}/metrics")
        if metrics:
            facts["cache"] = cache_config(metrics)
        server = await _json(client, f"{base}/server_info?config_format=json")
        if isinstance(server, dict):
            facts["active"] = optimisations(server)
    return facts


async def models_status(url: str, api_key: str | None = None) -> int | None:
    """The HTTP status at /v1/models; None when nobody answers."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(headers=headers, timeout=5.0, trust_env=False) as client:
        try:
            return (await client.get(f"{url.rstrip('/').removesuffix('/v1')}/v1/models")).status_code
        except httpx.HTTPError:
            return None


def cache_config(metrics: str) -> dict[str, str]:
    """The labels of `vllm:cache_config_info` that matter for a comparison; a changing set, so by name."""
    for line in metrics.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            found = dict(LABEL.findall(line))
            return {name: found[name] for name in CACHE_LABELS if name in found}
    return {}


def optimisations(server_info: dict[str, Any]) -> dict[str, Any]:
    """Which switches are really on, from `/server_info` (development mode only)."""
    config = server_info.get("vllm_config", server_info)
    wanted = {
        "scheduler_config": ("max_num_batched_tokens", "max_num_seqs", "policy", "async_scheduling",
                             "enable_chunked_prefill", "long_prefill_token_threshold", "stream_interval"),
        "model_config": ("model", "revision", "tokenizer", "tokenizer_revision", "dtype", "quantization",
                         "max_model_len", "enforce_eager"),
        "parallel_config": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        "speculative_config": ("method", "num_speculative_tokens"),
        "device_config": ("device_type",),
    }  # fmt: skip
    active: dict[str, Any] = {}
    for section, names in wanted.items():
        part = config.get(section) if isinstance(config, dict) else None
        if isinstance(part, dict):
            active |= {name: part[name] for name in names if name in part}
    return active


def facts_file(path: Path | None) -> dict[str, Any]:
    """What only the operator knows: driver, accelerator, model revision. A JSON object."""
    if path is None:
        return {}
    try:
        facts = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise FactsError(f'--facts {path}: {error}; a JSON object like {{"gpu": "H100", "driver": "550"}}') from error
    if not isinstance(facts, dict):
        raise FactsError(f"--facts {path}: holds a {type(facts).__name__}; a JSON object would be right")
    return facts


async def _json(client: httpx.AsyncClient, url: str) -> Any:
    text = await _text(client, url)
    try:
        return json.loads(text) if text else None
    except json.JSONDecodeError:
        return None


async def _text(client: httpx.AsyncClient, url: str) -> str | None:
    try:
        answer = await client.get(url)
    except httpx.HTTPError:
        return None
    return answer.text if answer.status_code == 200 else None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5, check=True)
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
