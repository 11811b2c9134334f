"""1,000 changes of membership in a minute while clients stream: what is lost, what is left, what it costs.

One gateway (with `--workers`, several processes) before simulated replicas, in processes of their own. Replicas are
added and removed through the admin API, evenly over the time; one stays, so that there is always an answer. Every
request must end whole. In the end: no request in flight or held, no metric label of a replica that is gone, and as many
descriptors as before, give or take those of idle connections.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress

from loadtests.bench.contenders import FOREBAY
from loadtests.bench.processes import Server
from loadtests.ports import free_ports, run_of_ports

CLIENTS = 6
SPARE_DESCRIPTORS = 40  # idle connections of clients and pools, which close by themselves
SETTLE_S = 30.0
POLICY = "least_request"  # without admission: then whatever is refused was lost to the change
CHAT = {"model": "sim", "max_tokens": 8, "stream": True}


@dataclass(slots=True)
class Churn:
    """What was seen. `left` names what should be gone and is not."""

    changes: int = 0
    seconds: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0
    memory_bytes: tuple[int, int] = (0, 0)
    descriptors: tuple[int, int] = (0, 0)
    left: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return set(self.answers) == {"whole"} and not self.left

    def lines(self) -> list[str]:
        lost = {kind: n for kind, n in self.answers.items() if kind != "whole"}
        before, after = (b / 2**20 for b in self.memory_bytes)
        whole = self.answers["whole"]
        return [
            f"{self.changes} changes in {self.seconds:.0f} s, {whole} answers whole, lost: {lost or 'none'}",
            f"gateway {self.cpu_s:.1f} s of CPU; {before:.0f} MiB before, {after:.0f} MiB after; "
            f"{self.descriptors[0]} descriptors before, {self.descriptors[1]} after",
            f"left over: {', '.join(self.left) or 'nothing'}",
        ]


def churn(changes: int, seconds: float, workers: int, replicas: int, console: Console) -> Churn:
    """Raises NotReadyError when a server does not start."""
    found = Churn()
    base, port = run_of_ports(replicas), free_ports(1)[0]
    gateway_url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="forebay-churn-") as folder:
        simulated = ["replica", "--port", str(base), "--count", str(replicas), "--model", "sim", "--time-scale", "20"]
        engines = Server([*FOREBAY, *simulated], Path(folder) / "replicas.log")
        config = Path(folder) / "gateway.toml"
        config.write_text("[retry]\nbudget_per_s = 100.0\n")
        serve = ["serve", "--config", str(config), "--port", str(port), "--workers", str(workers), "--policy", POLICY]
        gateway = Server([*FOREBAY, *serve, "--replica", f"http://127.0.0.1:{base}"], Path(folder) / "gateway.log")
        try:
            engines.wait_ready(f"http://127.0.0.1:{base + replicas - 1}/health")
            gateway.wait_ready(f"{gateway_url}/ready")
            found.descriptors = (_descriptors(gateway), 0)
            found.memory_bytes = (gateway.memory_bytes(), 0)
            before_s = gateway.cpu_s()
            stop = threading.Event()
            with ThreadPoolExecutor(CLIENTS) as pool:
                jobs = [pool.submit(_client, gateway_url, n, stop) for n in range(CLIENTS)]
                try:
                    _change(found, gateway_url, [base + i for i in range(1, replicas)], changes, seconds, console)
                finally:
                    stop.set()
                for job in jobs:
                    found.answers += job.result()
            found.cpu_s = gateway.cpu_s() - before_s
            found.left = _left(gateway_url)
            end = time.monotonic() + SETTLE_S
            while _descriptors(gateway) > found.descriptors[0] + SPARE_DESCRIPTORS and time.monotonic() < end:
                time.sleep(0.2)
            found.descriptors = (found.descriptors[0], _descriptors(gateway))
            found.memory_bytes = (found.memory_bytes[0], gateway.memory_bytes())
            if found.descriptors[1] > found.descriptors[0] + SPARE_DESCRIPTORS:
                found.left.append(f"{found.descriptors[1] - found.descriptors[0]} descriptors")
        finally:
            gateway.stop()
            engines.stop()
    return found


def _change(found: Churn, url: str, ports: list[int], changes: int, seconds: float, console: Console) -> None:
    rng, there = random.Random(1), dict[str, int]()
    started = time.monotonic()
    with Progress(console=console, transient=True) as progress, httpx.Client(base_url=url, timeout=60.0) as admin:
        for n in progress.track(range(changes), description="changes of membership"):
            free = [port for port in ports if port not in there.values()]
            if free and (not there or rng.random() < 0.5):
                port = rng.choice(free)
                there[f"r{n}"] = port
                admin.post("/admin/fleet", json={"url": f"http://127.0.0.1:{port}", "id": f"r{n}"}).raise_for_status()
            else:
                name = rng.choice(sorted(there))
                del there[name]
                admin.delete(f"/admin/fleet/{name}").raise_for_status()
            found.changes += 1
            time.sleep(max(0.0, started + (n + 1) * seconds / changes - time.monotonic()))
        for name in there:
            admin.delete(f"/admin/fleet/{name}").raise_for_status()
    found.seconds = time.monotonic() - started


def _client(url: str, number: int, stop: threading.Event) -> Counter[str]:
    """Streams one conversation after the other; answers how each ended."""
    seen: Counter[str] = Counter()
    with httpx.Client(base_url=url, timeout=120.0) as http:
        turn = 0
        while not stop.is_set():
            turn += 1
            messages = [{"role": "user", "content": f"client {number}, turn {turn}. " * 20}]
            try:
                answer = http.post("/v1/chat/completions", json={**CHAT, "messages": messages})
            except httpx.HTTPError as e:
                seen[type(e).__name__] += 1
                continue
            whole = answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
            seen["whole" if whole else f"{answer.status_code} {answer.text[-200:]}"] += 1
    return seen


def _left(url: str) -> list[str]:
    """What is open, held or named and should not be, once that has had time to end."""
    end = time.monotonic() + SETTLE_S
    while True:
        lines = [line for line in httpx.get(f"{url}/metrics", timeout=30.0).text.splitlines() if line[:1] != "#"]
        counts = ("forebay_open_requests", "forebay_held_requests", "forebay_replica_in_flight", "forebay_held_bytes")
        left = [line for line in lines if line.startswith(counts) and float(line.rsplit(" ", 1)[1]) > 0]
        named = {line.split('replica="')[1].split('"')[0] for line in lines if 'replica="' in line}
        left += [f"labels of {len(named) - 1} replicas"] if len(named) > 1 else []
        if not left or time.monotonic() >= end:
            return left
        time.sleep(0.2)


def _descriptors(server: Server) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in server.tree())
