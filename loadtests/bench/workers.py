"""What several workers cost beside one process, and how far away the core is.

CPU of the whole process tree per answer and per streamed event, N workers and their core against one process, in the
same rounds on the same core (`cost.py`); and the time from asking the core to its answer, as the workers count it, at
half load: the rate at which the gateway uses half of the CPU that it uses in a closed loop. (Half of the requests of
that loop would be more, since what comes in bursts costs less.) Bars: an event at most 1.11 times, a request at most
1.5 times, p99 of the middle one of several runs below 1 ms.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from loadtests.bench import cost, load, programs
from loadtests.bench.contenders import forebay
from loadtests.bench.processes import Server, two_cores
from loadtests.ports import free_ports

OPEN = 256  # connections of the open loop
STEP = 1 / (
    15 + (1 + 5**0.5) / 2
)  # of a period, between two connections that open: what they send is spread evenly then
TOLD_S = 1.1  # workers tell the core what they counted once a second
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
MOST_PER_EVENT, MOST_PER_REQUEST, MOST_P99_S = 1.11, 1.5, 0.001


@dataclass(frozen=True, slots=True)
class Answers:
    """`forebay_hand_decision_seconds` between two moments: cumulative counts by upper bound."""

    counts: dict[float, float]

    def quantile(self, q: float) -> float:
        """Upper bound of the bucket it lies in."""
        total = max(self.counts.values(), default=0.0)
        return next((bound for bound, n in sorted(self.counts.items()) if total and n >= q * total), float("nan"))

    def __sub__(self, before: Answers) -> Answers:
        return Answers({bound: n - before.counts.get(bound, 0.0) for bound, n in self.counts.items()})


def answers(port: int) -> Answers:
    counts: dict[float, float] = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        for line in page.read().decode().splitlines():
            if line.startswith("forebay_hand_decision_seconds_bucket"):
                bound = float(line.partition('le="')[2].partition('"')[0].replace("+Inf", "inf"))
                counts[bound] = counts.get(bound, 0.0) + float(line.rpartition(" ")[2])
    return Answers(counts)


def beside_one(
    policy: str,
    workers: int,
    scenarios: Sequence[cost.Scenario],
    rounds: int,
    round_s: float,
    console: Console,
    settle_s: float,
) -> cost.Results:
    """One process and several, each loaded for `settle_s` before."""
    contenders = [forebay(policy), forebay(policy, workers)]
    return cost.measure(contenders, scenarios, rounds, round_s, console, settle_s)


def bars(results: cost.Results, policy: str, workers: int) -> Sequence[cost.Bar]:
    one, several = forebay(policy).name, forebay(policy, workers).name
    limit = {"streamed event": MOST_PER_EVENT}
    return [cost.Bar(name, several, one, limit.get(name, MOST_PER_REQUEST)) for name in results]


@dataclass(frozen=True, slots=True)
class Distance:
    """How long the core took to answer at `rate` requests/s, run by run; a closed loop of 32 carried `full`. `errors`:
    answers that were none."""

    rate: float
    full: float
    took: list[Answers]
    errors: int

    def quantile(self, q: float) -> float:
        """Of the middle run; an upper bound, in seconds."""
        return statistics.median_low([one.quantile(q) for one in self.took])


def distance(policy: str, workers: int, runs: int, seconds: float, console: Console) -> Distance:
    """At half load, the gateway on all cores and what loads it on one of them."""
    load_core, gateway_core = two_cores()
    with tempfile.TemporaryDirectory(prefix="forebay-workers-") as folder, ExitStack() as running:
        into = Path(folder)
        replica = programs.command("null_replica", into, console)
        client = ["taskset", "-c", ",".join(map(str, load_core)), *programs.command("load_client", into, console)]
        ports = free_ports(3)
        replicas = Server([*replica, "10000", *map(str, ports[:2])], into / "replicas.log", load_core)
        running.callback(replicas.stop)
        urls = [f"http://127.0.0.1:{port}" for port in ports[:2]]
        replicas.wait_ready(f"{urls[0]}/health")
        server = Server(forebay(policy, workers).argv(ports[2], urls), into / "gateway.log", load_core | gateway_core)
        running.callback(server.stop)
        server.wait_ready(f"http://127.0.0.1:{ports[2]}/ready")
        body = into / "body.json"
        body.write_bytes(load.chat_body(60, turns=1, max_tokens=2, stream=False))

        def loaded(rate: float) -> tuple[load.Run, float]:
            """An open loop over connections that stay, as clients with a pool have, and that are opened one by one in
            the first fifteen periods; and the CPU it took, in cores."""
            period_us = int(OPEN * 1e6 / rate) if rate else 0
            step_us = int(period_us * STEP)
            before = server.cpu_s()
            run = load.drive(
                client,
                ports[2],
                body,
                connections=OPEN if rate else 32,
                seconds=seconds + OPEN * step_us / 1e6,
                stagger_us=step_us,
                period_us=period_us,
            )
            return run, (server.cpu_s() - before) / run.seconds

        with Progress(*COLUMNS, console=console, transient=True) as progress:
            task = progress.add_task("how much it carries", total=runs + 2)
            closed, cores = loaded(0.0)
            full = closed.answers / closed.seconds
            progress.advance(task)
            _, quarter = loaded(full / 4)
            rate = full / 4 * cores / 2 / quarter
            progress.update(task, advance=1, description=f"how long the core takes at {rate:.0f} requests/s")
            found = Distance(rate, full, [], closed.errors)
            for _ in range(runs):
                time.sleep(TOLD_S)
                before = answers(ports[2])
                run, _ = loaded(rate)
                time.sleep(TOLD_S)
                found.took.append(answers(ports[2]) - before)
                found = replace(found, errors=found.errors + run.errors)
                progress.advance(task)
            return found
