"""What one decision costs: CPU of each call of the core over 2, 8 and 64 replicas, of chain and matching; index memory.

A submit is measured with a ready chain of 8 chunks (2 KB), half of the requests warm and half new conversations under a
shared system prompt, with an empty index and with 10^3 to 10^6 chunks in it. First token, completion and pulse of the
same requests have clocks of their own, so the balancer stays in its steady state. CPU time of the thread, median over
rounds, clock overhead subtracted. Bars: submit 20 / 40 / 200 us, chain of a 2 KB chat 10 us and of 128 KB 120 us,
matching 32 KB over 64 replicas 150 us, 10^6 chunks in 200 MB, and a submit with them within 1.15 of one with 10^3 (no
growth with the index; an empty one has nothing to match, which saves about 3 us).
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from policies import make
from policies.arms import parse
from policies.canonical import canonical_parts
from policies.core import Balancer
from policies.index import PrefixIndex
from policies.model import Added, Dispatch, Outcome, Pulse, Request, ServiceClass, Usage
from policies.prefix import chain

SUBMIT_BARS_US = {2: 20.0, 8: 40.0, 64: 200.0}
CHUNKS = 1_000_000
SIZES = (1_000, 10_000, 100_000, CHUNKS)
CALLS = ("submit", "first_token", "complete", "pulse")
GROWTH = 1.15


@dataclass(slots=True)
class Measured:
    """One figure against its bar; `value` in `unit`, lower is better."""

    name: str
    value: float
    bar: float | None
    unit: str = "us"

    @property
    def ratio(self) -> float | None:
        return None if self.bar is None else self.value / self.bar

    @property
    def passed(self) -> bool:
        return self.bar is None or self.value <= self.bar


def random_chain(rng: random.Random, chunks: int, start: tuple[int, ...] = ()) -> tuple[int, ...]:
    return start + tuple([rng.getrandbits(64) for _ in range(chunks - len(start))])


def cost_us(call: Callable[[], object], times: int, rounds: int = 7) -> float:
    """Median over rounds of the CPU per call."""
    found = []
    for _ in range(rounds):
        start = time.thread_time_ns()
        for _ in range(times):
            call()
        found.append((time.thread_time_ns() - start) / times / 1000)
    return statistics.median(found)


def fill(index: PrefixIndex, rng: random.Random, chunks: int, system: tuple[int, ...]) -> None:
    """About so many distinct chunks, in prompts of 32 KB spread evenly over the replicas."""
    slots = [slot for slot, depth in enumerate(index.depths(())) if depth >= 0]
    for i in range(chunks // (128 - len(system))):
        index.insert(slots[i % len(slots)], random_chain(rng, 128, system))


class Submits:
    """One balancer in steady state."""

    def __init__(self, arm: str, replicas: int, indexed_chunks: int, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        parsed = parse(arm)
        policy = make(parsed.policy, {}, self.rng)
        classes = [ServiceClass("standard")]
        self.balancer = Balancer(classes, policy, parsed.settings, self.rng)
        self.now = 0.0
        for i in range(replicas):
            added = Added(f"http://10.0.0.{i}:8000", prefill_rate=20_000.0, kv_capacity_tokens=100_000_000)
            self.balancer.fleet_event(added, self.now)
        self.system = random_chain(self.rng, 4)
        if indexed_chunks:
            fill(self.balancer.dispatcher.affinity.index, self.rng, indexed_chunks, self.system)
        self.warm = [random_chain(self.rng, 8, self.system) for _ in range(256)]
        self.made = 0

    def request(self) -> Request:
        self.made += 1
        known = self.made % 2 == 0
        keys = self.rng.choice(self.warm) if known else random_chain(self.rng, 8, self.system)
        return Request(
            f"r{self.made}",
            model="m",
            session=f"s{self.made % 500}",
            received_at=self.now,
            ttft_deadline=self.now + 10.0,
            tpot_s=0.2,
            prompt_bytes=8 * 256,
            prompt_tokens=512,
            chain=keys,
            expected_tokens=100,
            max_tokens=200,
        )

    def round_us(self, submits: int) -> dict[str, float]:
        """CPU per call over one round, by `CALLS`, the clock's own cost subtracted."""
        spent, clock = dict.fromkeys(CALLS, 0), time.thread_time_ns
        overhead = min(clock_cost_ns() for _ in range(5))
        balancer = self.balancer
        for _ in range(submits):
            request = self.request()
            self.now += 0.1
            start = clock()
            decisions = balancer.submit(request, self.now)
            spent["submit"] += clock() - start - overhead
            chosen = next((d for d in decisions if isinstance(d, Dispatch) and d.request_id == request.id), None)
            if chosen is None:
                raise RuntimeError(f"a submit was not dispatched at once but {decisions}: the bench must not queue")
            self.now += 0.05
            start = clock()
            balancer.first_token(request.id, self.now)
            spent["first_token"] += clock() - start - overhead
            pulse = Pulse(live=1, least_slack_s=0.1, idle_gaps=2, idle_gap_sum_s=0.04)
            start = clock()
            balancer.pulse(chosen.replica_id, pulse, self.now)
            spent["pulse"] += clock() - start - overhead
            self.now += 0.05
            start = clock()
            balancer.complete(request.id, Outcome.SUCCESS, Usage(512, 100, 256), self.now)
            spent["complete"] += clock() - start - overhead
        return {call: ns / submits / 1000 for call, ns in spent.items()}


def clock_cost_ns() -> int:
    start = time.thread_time_ns()
    return time.thread_time_ns() - start


def calls_us(arm: str, replicas: int, indexed_chunks: int, rounds: int, each: int) -> dict[str, float]:
    """Median over rounds of the CPU of each call."""
    bench = Submits(arm, replicas, indexed_chunks)
    bench.round_us(each)  # warm caches, rings, pools
    gc.collect()
    gc.freeze()
    try:
        found = [bench.round_us(each) for _ in range(rounds)]
        return {call: statistics.median(one[call] for one in found) for call in CALLS}
    finally:
        gc.unfreeze()


def chains() -> list[Measured]:
    """From the parsed body to the keys: the canonical parts and the chain, and the chain alone."""
    turns = [("system", 900), ("user", 300), ("assistant", 500), ("user", 300)]
    chat = {"model": "m", "messages": [{"role": role, "content": "x" * size} for role, size in turns]}
    long = {"model": "m", "messages": [{"role": "user", "content": "x" * (128 * 1024)}]}
    small, large = canonical_parts("chat", chat), canonical_parts("chat", long)
    return [
        Measured("chain of a 2 KB chat", cost_us(lambda: chain(small), 5000), 10.0),
        Measured("canonical parts of a 2 KB chat", cost_us(lambda: canonical_parts("chat", chat), 5000), None),
        Measured("chain of 128 KB", cost_us(lambda: chain(large), 300), 120.0),
        Measured("canonical parts of 128 KB", cost_us(lambda: canonical_parts("chat", long), 300), None),
    ]


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def matching() -> list[Measured]:
    """A 32 KB prompt against 64 replicas with 10^6 chunks indexed, and what the index weighs."""
    rng = random.Random(7)
    gc.collect()
    before = resident_mb()
    index = PrefixIndex()
    for i in range(64):
        index.add(f"r{i}", 20_000)
    system = random_chain(rng, 4)
    fill(index, rng, CHUNKS, system)
    weight = resident_mb() - before
    prompt = random_chain(rng, 128, system)
    for slot in range(64):  # the worst case: every replica holds a different depth
        index.insert(slot, prompt[: 2 * (slot + 1)])
    cold = random_chain(rng, 128, system)
    return [
        Measured("match 32 KB, 64 depths on 64 replicas", cost_us(lambda: index.depths(prompt), 1000), 150.0),
        Measured("match 32 KB, cold below the system prompt", cost_us(lambda: index.depths(cold), 1000), 150.0),
        Measured("insert 32 KB again", cost_us(lambda: index.insert(63, prompt), 1000), None),
        Measured(f"memory of {len(index) / 1e6:.2f} million chunks on 64 replicas", weight, 200.0, "MB"),
    ]


def measure(arms: list[str], rounds: int, each: int, console: Console) -> list[Measured]:
    found: list[Measured] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("decisions", total=2 + (2 * len(SUBMIT_BARS_US) + len(SIZES) - 1) * len(arms))
        found += chains()
        progress.advance(task)
        found += matching()
        progress.advance(task)
        for arm in arms:
            fulls = {}
            for replicas, bar in SUBMIT_BARS_US.items():
                empty = calls_us(arm, replicas, 0, rounds, each)
                progress.advance(task)
                full = fulls[replicas] = calls_us(arm, replicas, CHUNKS, rounds, each)
                progress.advance(task)
                found.append(Measured(f"{arm}: submit over {replicas}, empty index", empty["submit"], bar))
                found.append(Measured(f"{arm}: submit over {replicas}, 10^6 chunks", full["submit"], bar))
                growth = full["submit"] / empty["submit"]
                found.append(Measured(f"{arm}: over {replicas}, full against empty", growth, None, "x"))
                for call in CALLS[1:]:
                    found.append(Measured(f"{arm}: {call} over {replicas}, 10^6 chunks", full[call], None))
            by_size = []
            for chunks in SIZES[:-1]:
                by_size.append(calls_us(arm, 8, chunks, rounds, each)["submit"])
                progress.advance(task)
                found.append(Measured(f"{arm}: submit over 8, 10^{len(str(chunks)) - 1} chunks", by_size[-1], None))
            growth = fulls[8]["submit"] / by_size[0]
            found.append(Measured(f"{arm}: over 8, 10^6 chunks against 10^3", growth, GROWTH, "x"))
    return found


def show(found: list[Measured], console: Console) -> bool:
    """Prints the table; True if every bar is met."""
    table = Table(title="CPU per call, median of rounds")
    for column in ("", "measured", "bar", "ratio", ""):
        table.add_column(column, justify="left" if column == "" else "right")
    for one in found:
        bar = "" if one.bar is None else f"{one.bar:g} {one.unit}"
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        verdict = "" if one.bar is None else "[green]pass" if one.passed else "[red]MISSED"
        table.add_row(
            one.name, f"{one.value:.1f} {one.unit}" if one.unit != "x" else f"{one.value:.2f}", bar, ratio, verdict
        )
    console.print(table)
    return all(one.passed for one in found)


def run(arms: list[str], *, quick: bool, out: Path | None, console: Console) -> bool:
    """Measures, prints, writes JSON if asked; True if every bar is met."""
    found = measure(arms, rounds=3 if quick else 9, each=300 if quick else 2000, console=console)
    if out is not None:
        rows = [asdict(one) | {"ratio": one.ratio, "passed": one.passed} for one in found]
        out.write_text(json.dumps({"command": "python -m loadtests.bench decisions", "results": rows}, indent=1) + "\n")
    return show(found, console)
