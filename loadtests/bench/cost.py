"""CPU time per request and per streamed event: ours beside vllm-router's, in turns, in one run.

    us per request = CPU time of the gateway's process tree / answers
    us per event   = CPU time of the gateway's process tree / content events (streams of 128, 10 ms apart, 200 at once)

Null replicas and load client share one core, the gateway has the other. Every round measures every contender once,
so that a machine that slows down slows all of them; a ratio is the median of the ratios of the same round. The time of
a stream's request is part of its events. Requests are sent in closed loop; a gateway that holds some back is measured
at lower load.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from loadtests.bench import load, programs
from loadtests.bench.contenders import ALL_ON, Contender
from loadtests.bench.processes import Server, two_cores
from loadtests.ports import free_ports

EVENTS = 128
INTERVAL_US = 10_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """`each` answers per connection where it is set (streams), else as many as fit into the round."""

    name: str
    prompt_bytes: int
    turns: int
    connections: int
    streams: bool = False
    each: int = 0


SCENARIOS = (
    Scenario("short request", 60, 1, 32),
    Scenario("32 KB prompt", 32 * 1024, 16, 16),
    Scenario("400 KB prompt", 400 * 1024, 8, 4),
    Scenario("streamed event", 60, 1, 200, streams=True, each=2),
)


@dataclass(frozen=True, slots=True)
class Bar:
    """`contender` may cost at most `at_most` times what `beside` costs."""

    scenario: str
    contender: str
    beside: str
    at_most: float


SIMPLE = "forebay round_robin"
ROUND_ROBIN, CACHE_AWARE = "vllm-router round_robin", "vllm-router cache_aware"
BARS = (
    Bar("short request", SIMPLE, ROUND_ROBIN, 0.9),
    Bar("32 KB prompt", SIMPLE, ROUND_ROBIN, 0.9),
    Bar("streamed event", SIMPLE, ROUND_ROBIN, 1.0),
    Bar("short request", ALL_ON, CACHE_AWARE, 0.5),
    Bar("32 KB prompt", ALL_ON, CACHE_AWARE, 0.5),
    Bar("400 KB prompt", ALL_ON, CACHE_AWARE, 0.6),
    Bar("streamed event", ALL_ON, ROUND_ROBIN, 1.0),
)


@dataclass(slots=True)
class Measured:
    """One contender in one scenario: CPU per answer or event of each round, and what else the load client saw."""

    us: list[float] = field(default_factory=list)
    per_s: list[float] = field(default_factory=list)
    errors: int = 0
    first_error: str = ""

    @property
    def median_us(self) -> float:
        return statistics.median(self.us) if self.us else float("nan")


Results = dict[str, dict[str, Measured]]  # scenario -> contender -> measured


def ratios(results: Results, bar: Bar) -> list[float]:
    """Ratio of each round; empty if either side was not measured."""
    row = results.get(bar.scenario, {})
    if bar.contender not in row or bar.beside not in row:
        return []
    return [ours / theirs for ours, theirs in zip(row[bar.contender].us, row[bar.beside].us, strict=True)]


def measure(
    contenders: Sequence[Contender],
    scenarios: Sequence[Scenario],
    rounds: int,
    round_s: float,
    console: Console,
    settle_s: float = 0.0,
) -> Results:
    """Runs everything. Raises NotReadyError if a contender does not start; failed requests are counted.

    settle_s: for so long each is loaded with its longest prompts before. A gateway that starts may spend more on
    looking into prompts, for 20 s of such a load, and how long that lasts beside others is not the same for all."""
    load_core, gateway_core = two_cores()
    results: Results = {s.name: {c.name: Measured() for c in contenders} for s in scenarios}
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder, ExitStack() as running:
        into = Path(folder)
        replica = programs.command("null_replica", into, console)
        client = ["taskset", "-c", ",".join(map(str, load_core)), *programs.command("load_client", into, console)]
        replica_ports = free_ports(2)
        argv = [*replica, str(INTERVAL_US), *map(str, replica_ports)]
        replicas = Server(argv, into / "replicas.log", load_core)
        running.callback(replicas.stop)
        urls = [f"http://127.0.0.1:{port}" for port in replica_ports]
        replicas.wait_ready(f"{urls[0]}/health")
        servers: dict[str, tuple[Server, int]] = {}
        for i, contender in enumerate(contenders):
            (port,) = free_ports(1)
            with console.status(f"starting {contender.name}"):
                server = Server(contender.argv(port, urls), into / f"contender-{i}.log", gateway_core)
                running.callback(server.stop)
                server.wait_ready(f"http://127.0.0.1:{port}{contender.ready_path}")
            servers[contender.name] = server, port
        bodies = {}
        for s in scenarios:
            bodies[s.name] = into / f"{s.name}.json"
            max_tokens = EVENTS if s.streams else 2
            bodies[s.name].write_bytes(
                load.chat_body(s.prompt_bytes, turns=s.turns, max_tokens=max_tokens, stream=s.streams)
            )

        def one(scenario: Scenario, name: str, seconds: float) -> tuple[float, load.Run]:
            server, port = servers[name]
            before = server.cpu_s()
            run = load.drive(
                client,
                port,
                bodies[scenario.name],
                connections=scenario.connections,
                seconds=0 if scenario.each else seconds,
                each=scenario.each,
                stagger_us=INTERVAL_US // scenario.connections if scenario.streams else 0,
            )
            return server.cpu_s() - before, run

        steps = len(scenarios) * len(contenders) * (rounds + 1)
        columns = (TextColumn("{task.description:<45}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            settling = contenders if settle_s else ()
            task = progress.add_task("", total=steps + len(settling))
            longest = max(scenarios, key=lambda one: one.prompt_bytes)
            for contender in settling:
                progress.update(task, description=f"{contender.name} settles")
                one(longest, contender.name, settle_s)
                progress.advance(task)
            for scenario in scenarios:
                for turn in range(-1, rounds):  # the first turn warms up and is thrown away
                    for contender in contenders:
                        progress.update(task, description=f"{scenario.name}: {contender.name}")
                        cpu_s, run = one(scenario, contender.name, round_s if turn >= 0 else round_s / 2)
                        progress.advance(task)
                        measured = results[scenario.name][contender.name]
                        measured.errors += run.errors
                        measured.first_error = measured.first_error or run.first_error
                        units = run.answers * (EVENTS if scenario.streams else 1)
                        if turn >= 0:
                            measured.us.append(cpu_s / units * 1e6 if units else float("nan"))
                            measured.per_s.append(units / run.seconds)
    return results
