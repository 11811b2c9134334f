"""Simulated replicas in a process of their own, for tests of whole gateways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from loadtests.bench.contenders import FOREBAY
from loadtests.bench.processes import Server
from loadtests.ports import run_of_ports
from tests.serving import PLAIN


@dataclass
class Simulated:
    """Simulated replicas in the one process `pid`; `order` breaks one of them."""

    urls: list[str]
    pid: int

    def order(self, i: int, kind: str, **values: float) -> None:
        # ordered through the last one, which no test switches off: a replica that refuses connects takes no orders
        url = f"{self.urls[-1]}/forebay/fault?replica={i}"
        answer = httpx.post(url, json={"kind": kind, **values}, timeout=30, verify=PLAIN)
        assert answer.status_code == 200, answer.text

    def index(self, name: str) -> int:
        return next(i for i, url in enumerate(self.urls) if name in url)


@contextmanager
def simulated(folder: Path, count: int = 3, *flags: str) -> Iterator[Simulated]:
    base = run_of_ports(count)
    argv = [*FOREBAY, "replica", "--port", str(base), "--count", str(count), "--profile", "h100-8b", "--model", "tiny"]
    server = Server([*argv, *flags], folder / "replicas.log")
    urls = [f"http://127.0.0.1:{base + i}" for i in range(count)]
    try:
        for url in urls:
            server.wait_ready(f"{url}/health", within_s=180)
        yield Simulated(urls, server.process.pid)
    finally:
        server.stop()
