"""Many slow streams at once: by default 2,000 streams of 5 events a second each on one gateway process.

Holds if no stream fails, memory per open stream stays below 40 KiB (PSS of the process tree at its highest, less what
it was before, over the streams), and `/health`, asked ten times a second on a connection of its own, always answers
within 100 ms. The streams start over the first seconds, as clients do; then all of them stay open until the end.
"""

from __future__ import annotations

import http.client
import json
import re
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen

from rich.console import Console
from rich.progress import Progress

from loadtests.bench import load, programs
from loadtests.bench.contenders import Contender
from loadtests.bench.processes import Server, two_cores
from loadtests.ports import free_ports

EVENTS_PER_S = 5
START_S = 4.0  # the streams open evenly over this time, or longer where they are many:
OPENED_PER_S = 250.0
MOST_BYTES_PER_STREAM = 40 * 1024
MOST_HEALTH_S = 0.1


@dataclass(slots=True)
class Soak:
    """What was seen; `holds` says whether the bars were met."""

    streams: int
    run: load.Run | None = None
    idle_bytes: int = 0
    peak_bytes: int = 0
    cpu_s: float = 0.0
    health_s: list[float] = field(default_factory=list)
    health_failures: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # by the reasons that our own gateway gives

    @property
    def bytes_per_stream(self) -> float:
        return (self.peak_bytes - self.idle_bytes) / self.streams

    @property
    def holds(self) -> bool:
        return (
            self.run is not None
            and self.run.errors == 0
            and self.run.answers == self.streams
            and self.bytes_per_stream < MOST_BYTES_PER_STREAM
            and self.health_failures == 0
            and max(self.health_s, default=MOST_HEALTH_S) < MOST_HEALTH_S
        )


def ask_health(port: int) -> float | None:
    """Seconds until the whole answer of `/health` on a new connection; None if it was not 200."""
    begun = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        return time.perf_counter() - begun if answer.status == 200 else None
    except OSError:
        return None
    finally:
        connection.close()


def refusals(port: int) -> dict[str, int]:
    """Requests that the gateway itself did not serve, by its reason; of the door, what it was short of."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: Counter[str] = Counter()
    for name, label in (("forebay_requests_total", "reason"), ("forebay_door_refusals_total", "of")):
        for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE):
            (reason,) = re.findall(rf'(?:^|,){label}="([^"]*)"', labels)
            found[f"door: {reason}" if label == "of" else reason] += int(float(value))
    return {reason: count for reason, count in found.items() if reason and count}


def soak(
    contender: Contender,
    streams: int,
    seconds: float,
    console: Console,
    events_per_s: float = EVENTS_PER_S,
    both_cores: bool = False,
    fleet: int = 2,
) -> Soak:
    """Opens `streams` streams that last `seconds` each. `both_cores`: the gateway may use the load's core as well;
    `fleet`: replicas, all of them one process.

    Raises NotReadyError when the gateway does not start.
    """
    load_core, gateway_core = two_cores()
    if both_cores:
        gateway_core |= load_core
    start_s = max(START_S, streams / OPENED_PER_S)
    result = Soak(streams)
    with tempfile.TemporaryDirectory(prefix="forebay-soak-") as folder, ExitStack() as running:
        into = Path(folder)
        replica = programs.command("null_replica", into, console)
        client = ["taskset", "-c", ",".join(map(str, load_core)), *programs.command("load_client", into, console)]
        ports = free_ports(fleet)
        replicas = Server(
            [*replica, str(round(1_000_000 / events_per_s)), *map(str, ports)], into / "replicas.log", load_core
        )
        running.callback(replicas.stop)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        replicas.wait_ready(f"{urls[0]}/health")
        (port,) = free_ports(1)
        server = Server(contender.argv(port, urls), into / "gateway.log", gateway_core)
        running.callback(server.stop)
        server.wait_ready(f"http://127.0.0.1:{port}{contender.ready_path}")
        body = into / "body.json"
        tokens = round((seconds + start_s) * events_per_s)
        body.write_bytes(load.chat_body(60, turns=1, max_tokens=tokens, stream=True))
        warm = into / "warm.json"
        warm.write_bytes(load.chat_body(60, turns=1, max_tokens=5, stream=True))
        load.drive(client, port, warm, connections=20, each=1)
        result.idle_bytes, cpu_before = server.memory_bytes(), server.cpu_s()
        argv = [*client, str(port), str(streams), "0", "1", str(int(start_s * 1e6 / streams)), str(body)]
        with Popen(argv, stdout=PIPE, text=True) as driver, Progress(console=console, transient=True) as progress:
            task = progress.add_task(f"{streams} streams", total=seconds + 2 * start_s)
            begun, looked = time.monotonic(), 0.0
            while driver.poll() is None:
                now = time.monotonic()
                answered_s = ask_health(port)
                if answered_s is None:
                    result.health_failures += 1
                else:
                    result.health_s.append(answered_s)
                if now - looked > 1.0:
                    looked = now
                    result.peak_bytes = max(result.peak_bytes, server.memory_bytes())
                progress.update(task, completed=now - begun)
                time.sleep(max(0.0, now + 0.1 - time.monotonic()))
            assert driver.stdout is not None
            result.run = load.Run(**json.loads(driver.stdout.read()))
        result.cpu_s = server.cpu_s() - cpu_before
        if contender.ready_path == "/ready":
            result.refused = refusals(port)
    return result
