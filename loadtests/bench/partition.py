"""Two gateways share Redis and replicas; packets of one of them are dropped for a while: what its clients see.

Redis, the simulated replicas and one gateway run here, the other gateway in a network namespace of its own behind two
pairs of virtual interfaces: one to the backends, one to its clients. A partition sets the neighbour entries of the
first pair, on both sides, to an address that nobody has, so every packet leaves and none arrives, with no error for
anybody. Holds if every request of every client ends exactly once as a whole answer, a refusal or an error of the
gateway, if those of the other gateway all end whole, and if nothing stays charged, held or unheard of afterwards.
Needs root, `ip` and redis-server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console

from loadtests.bench.contenders import FOREBAY
from loadtests.bench.processes import Server
from loadtests.ports import free_ports, run_of_ports

CLIENTS = 8  # of each gateway
BACK, FRONT = ("10.213.7.1", "10.213.7.2"), ("10.213.8.1", "10.213.8.2")  # here, in the namespace
NOBODY = "02:00:00:00:00:99"
SETTLE_S = 60.0
CONFIG = """
[redis]
url = "redis://{redis}/0"
[scrape]
interval_s = 0.5
[health]
probe_interval_s = 0.5
slow_start_s = 0.0
"""
LEFT = ("forebay_open_requests", "forebay_held_requests", "forebay_replica_in_flight", "forebay_held_bytes",
        "forebay_replica_prefill_backlog_tokens")  # fmt: skip


@dataclass(slots=True)
class Partitioned:
    """What was seen; outcomes by gateway: `whole` was never cut off, `cut` was."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    recorded: dict[str, float] = field(default_factory=dict)
    back_s: float = 0.0  # until both had all replicas and each other again
    left: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        once = all(self.recorded[name] == seen.total() for name, seen in self.outcomes.items())
        clean = not any(kind.startswith("lost") for seen in self.outcomes.values() for kind in seen)
        return once and clean and set(self.outcomes["whole"]) == {"whole"} and not self.left


class Namespace:
    """A network namespace with two pairs of interfaces. Raises CalledProcessError without the rights."""

    def __init__(self) -> None:
        self.name = f"fb{os.getpid()}"
        self.pairs = {f"fbb{os.getpid()}": BACK, f"fbf{os.getpid()}": FRONT}

    def make(self) -> None:
        _ip("netns", "add", self.name)
        self.run("link", "set", "lo", "up")
        for pair, (here, there) in self.pairs.items():
            _ip("link", "add", f"{pair}h", "type", "veth", "peer", "name", f"{pair}n", "netns", self.name)
            _ip("addr", "add", f"{here}/30", "dev", f"{pair}h")
            _ip("link", "set", f"{pair}h", "up")
            self.run("addr", "add", f"{there}/30", "dev", f"{pair}n")
            self.run("link", "set", f"{pair}n", "up")

    def run(self, *words: str) -> None:
        _ip("-n", self.name, *words)

    def drop(self, dropped: bool) -> None:
        """Whether packets between the gateway and its backends are lost."""
        pair = next(iter(self.pairs))
        if dropped:
            self.run("neigh", "replace", BACK[0], "lladdr", NOBODY, "nud", "permanent", "dev", f"{pair}n")
            _ip("neigh", "replace", BACK[1], "lladdr", NOBODY, "nud", "permanent", "dev", f"{pair}h")
        else:
            self.run("neigh", "del", BACK[0], "dev", f"{pair}n")
            _ip("neigh", "del", BACK[1], "dev", f"{pair}h")

    def close(self) -> None:
        for pair in self.pairs:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("link", "del", f"{pair}h")
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", self.name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def _servers(space: Namespace, folder: Path) -> Iterator[tuple[dict[str, str], int]]:
    """The addresses of both gateways, and how many replicas they have."""
    base, (redis, port) = run_of_ports(2), free_ports(2)
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise FileNotFoundError("redis-server")
    plain = ["--port", str(redis), "--bind", BACK[0], "--save", "", "--protected-mode", "no", "--dir", str(folder)]
    (folder / "gateway.toml").write_text(CONFIG.format(redis=f"{BACK[0]}:{redis}"))
    fleet = [*FOREBAY, "replica", "--host", BACK[0], "--port", str(base), "--count", "2", "--model", "sim"]
    serve = [*FOREBAY, "serve", "--config", str(folder / "gateway.toml"), "--port", str(port)]
    serve += [part for i in range(2) for part in ("--replica", f"http://{BACK[0]}:{base + i}")]
    inside = ["ip", "netns", "exec", space.name]
    with contextlib.ExitStack() as stack:
        for argv, name in (([program, *plain], "redis"), (fleet, "replicas"), ([*serve, "--host", BACK[0]], "whole"),
                           ([*inside, *serve, "--host", FRONT[1]], "cut")):  # fmt: skip
            stack.callback(Server(argv, folder / f"{name}.log").stop)
        urls = {"whole": f"http://{BACK[0]}:{port}", "cut": f"http://{FRONT[1]}:{port}"}
        for url in urls.values():
            _wait(lambda url=url: _ready(url), f"{url}/ready")  # type: ignore[misc]
        yield urls, 2


def partition(seconds: float, dropped_s: float, console: Console) -> Partitioned:
    """Clients stream for `seconds`; packets are dropped for `dropped_s` in the middle. Raises CalledProcessError,
    FileNotFoundError or TimeoutError where it cannot be set up."""
    found, space, stop = Partitioned(), Namespace(), threading.Event()
    with tempfile.TemporaryDirectory(prefix="forebay-partition-") as folder:
        try:
            space.make()
            with _servers(space, Path(folder)) as (urls, replicas), ThreadPoolExecutor(2 * CLIENTS) as pool:
                _wait(lambda: _complete(urls, replicas), "both gateways have all replicas and each other")
                jobs = {n: [pool.submit(_client, u, i, stop) for i in range(CLIENTS)] for n, u in urls.items()}
                with console.status("streams, a partition, streams"):
                    time.sleep((seconds - dropped_s) / 2)
                    space.drop(True)
                    time.sleep(dropped_s)
                    space.drop(False)
                    healed = time.monotonic()
                    _wait(lambda: _complete(urls, replicas), "they have them again")
                    found.back_s = time.monotonic() - healed
                    time.sleep((seconds - dropped_s) / 2)
                stop.set()
                for name, url in urls.items():
                    found.outcomes[name] = sum((job.result() for job in jobs[name]), Counter[str]())
                    with contextlib.suppress(TimeoutError):
                        _wait(lambda url=url: not any(_value(url, one) for one in LEFT), "nothing is left")  # type: ignore[misc]
                    found.left += [f"{name}: {one}" for one in LEFT if _value(url, one)]
                    found.recorded[name] = _value(url, "forebay_requests_total")
        finally:
            stop.set()
            space.close()
    return found


def _complete(urls: Mapping[str, str], replicas: int) -> bool:
    """Whether every gateway has all replicas and knows the other."""
    here = all(_value(url, "forebay_replica_available") == replicas for url in urls.values())
    return here and all(_value(url, "forebay_shared_peers") == 1 for url in urls.values())


def _client(url: str, number: int, stop: threading.Event) -> Counter[str]:
    seen: Counter[str] = Counter()
    with httpx.Client(base_url=url, timeout=120.0, trust_env=False) as http:
        turn = 0
        while not stop.is_set():
            turn += 1
            messages = [{"role": "user", "content": f"client {number}, turn {turn}. " * 20}]
            body = {"model": "sim", "stream": True, "max_tokens": 100, "messages": messages}
            try:
                answer = http.post("/v1/chat/completions", json=body)
            except httpx.HTTPError as e:
                seen[f"lost: {type(e).__name__}"] += 1
                continue
            ends, error = answer.text.count("data: [DONE]"), '"error"' in answer.text
            if answer.status_code != 200:
                seen[f"refused with {answer.status_code}"] += 1
                stop.wait(0.2)  # as a client that heeds Retry-After, in short
            elif ends + error != 1:
                seen[f"lost: {ends} ends, an error: {error}"] += 1
            else:
                seen["whole" if ends else "ended by an error event"] += 1
    return seen


def _value(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30.0, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _wait(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SETTLE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {SETTLE_S:g} s: {what}")
        time.sleep(0.1)
