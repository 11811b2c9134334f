"""What 2,000 held requests cost those that are admitted: CPU of their decisions, with and without them.

One balancer over 8 replicas in steady state under virtual time: a replica shows a first token, which may hand its
place to a held request; a new one comes; an old one ends; pulses and wakes as in the gateway. The cost of an admitted
request is the CPU of the whole event that dispatched it. Bar: p99 with 2,000 held at most 1 ms above p99 with 8 held.
CPU time of the thread, so that a busy machine does not show. Trade-off: in one process nothing else delays a decision
but other decisions, so their CPU is the delay; the event loop's own delays are `soak`'s.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.progress import track

from loadtests.bench.decisions import Measured, random_chain
from policies import make
from policies.arms import parse
from policies.core import Balancer
from policies.model import Added, Decision, Dispatch, Outcome, Pulse, Request, ServiceClass, Usage
from policies.statistics import quantile

REPLICAS, TOKENS, RATE = 8, 2_000, 20_000.0
ANSWERS_S = 2.0
FEW, MANY = 8, 2_000
BAR_MS = 1.0
PATIENT = ServiceClass("patient", ttft_s=36_000.0, tpot_s=0.2, sheddable=False)  # waits, and is never refused


class Standing:
    """A balancer whose queue stands at `held` requests."""

    def __init__(self, held: int, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        parsed = parse("forebay")
        self.balancer = Balancer([PATIENT], make("forebay", {}, self.rng), parsed.settings, self.rng)
        self.now, self.made = 0.0, 0
        self.prefilling: dict[str, deque[str]] = {f"r{i}": deque() for i in range(REPLICAS)}
        self.answering: deque[tuple[float, str]] = deque()
        for name in self.prefilling:
            self.balancer.fleet_event(Added(name, prefill_rate=RATE, kv_capacity_tokens=100_000_000), 0.0)
        while self.balancer.binding.queue.count < held:
            self.submit()

    def submit(self) -> list[Decision]:
        self.made += 1
        request = Request(
            f"q{self.made}", model="m", tenant=f"t{self.made % 20}", session=f"s{self.made % 997}",
            service_class="patient", received_at=self.now, ttft_deadline=self.now + 36_000.0, tpot_s=0.2,
            prompt_bytes=4 * TOKENS, prompt_tokens=TOKENS, chain=random_chain(self.rng, 31), expected_tokens=100,
        )  # fmt: skip
        return self.follow(self.balancer.submit(request, self.now))

    def follow(self, decisions: list[Decision]) -> list[Decision]:
        for decision in decisions:
            if isinstance(decision, Dispatch):
                self.prefilling[decision.replica_id].append(decision.request_id)
        return decisions

    def round(self) -> list[float]:
        """One first token of each replica and what follows: ms of CPU of every event that admitted a request."""
        found: list[float] = []

        def timed(event: Callable[[], list[Decision]]) -> None:
            start = time.thread_time_ns()
            decisions = event()
            spent = (time.thread_time_ns() - start) / 1e6
            found.extend([spent] * sum(isinstance(d, Dispatch) for d in self.follow(decisions)))

        core = self.balancer
        for name, queue in self.prefilling.items():
            self.now += TOKENS / RATE / REPLICAS
            now = self.now
            if queue:
                first = queue.popleft()
                self.answering.append((now + ANSWERS_S, first))
                timed(partial(core.first_token, first, now))
            while self.answering and self.answering[0][0] <= now:
                timed(partial(core.complete, self.answering.popleft()[1], Outcome.SUCCESS, Usage(TOKENS, 100, 0), now))
            timed(partial(core.pulse, name, Pulse(20, 0, 0.1, 20, 0.3, 4, 0.4), now))
            timed(partial(self.woken, now))
            self.submit()
        return found

    def woken(self, now: float) -> list[Decision]:
        self.balancer.next_wake()
        return self.balancer.wake(now)


def p99_ms(held: int, rounds: int, console: Console) -> float:
    """CPU of the event that admitted a request."""
    standing = Standing(held)
    for _ in range(50):
        standing.round()
    gc.collect()
    gc.freeze()
    try:
        steps = track(range(rounds), f"{held:,} held", console=console, transient=True)
        found = sorted([spent for _ in steps for spent in standing.round()])
    finally:
        gc.unfreeze()
    return quantile(found, 0.99)


def run(*, quick: bool, console: Console) -> bool:
    """Measures and prints; True if the bar is met."""
    rounds = 300 if quick else 2_000
    few, many = p99_ms(FEW, rounds, console), p99_ms(MANY, rounds, console)
    added = Measured(f"p99 with {MANY:,} held less p99 with {FEW}", many - few, BAR_MS, "ms")
    console.print(f"CPU of an admitted request, p99: {few:.3f} ms with {FEW} held, {many:.3f} ms with {MANY:,} held")
    console.print(f"{added.name}: {added.value:.3f} ms, bar {BAR_MS:g} ms: {'met' if added.passed else 'MISSED'}")
    return added.passed
