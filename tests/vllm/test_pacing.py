"""Long prompts beside streams on two real replicas: pacing keeps the streams' time per token, its absence does not.

The objective comes from this machine, between what pacing can choose from: the time per token that the same streams
have alone, and an engine step that carries a whole long prompt. It stands two fifths of the way on a scale of ratios,
because even without pacing there are plain steps between those. The long prompts, each new to every cache, come from
clients that always have one waiting, so that both replicas have prefill work at any speed of the machine. The arms
differ in pacing alone, take turns, and nothing is refused in either. A turn in which the machine itself became faster
or slower, as the streams alone show before, between and after the arms, says nothing and is repeated.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.serving import PLAIN, Gateway, chat, gateway, streaming
from tests.vllm.replicas import Replicas, say

STREAMS, TOKENS, ROUNDS = 6, 120, 2
LONG_CLIENTS, LONG_PROMPT_TOKENS = 8, 1900  # fits into one step: serve.sh allows 2048 tokens
TURNS, ATTEMPTS = 2, 6  # turns that count, of each arm; turns at most
STEADY = 1.5  # the most that the machine may change over a turn
pytestmark = pytest.mark.timing  # judged by the clock, so `make bench-vllm` runs it and `make test-vllm` does not
# not `forebay`: it keeps long prompts and streams apart where it can, which is a remedy of its own
UNPACED, PACED = "least_request+admission", "least_request+admission+pacing"
PATIENT = """
[limits]
loop_lag_s = "none"
[classes.interactive]
ttft_s = 60.0
tpot_s = "none"
sheddable = false
[classes.standard]
ttft_s = 300.0
tpot_s = "none"
sheddable = false
"""


@dataclass
class Arm:
    """What the streams and the long prompts of one arm got in one turn."""

    tpots_s: list[float] = field(default_factory=list)
    served: int = 0
    served_in_s: float = 0.0

    def within(self, objective_s: float) -> int:
        return sum(tpot_s <= objective_s for tpot_s in self.tpots_s)


def tpot_s(url: str, objective_s: float | None = None) -> float:
    """Mean time per token of one stream as its client sees it. A stream that cannot make it any more is left."""
    body = chat(f"a short question {random.random()}", max_tokens=TOKENS)
    headers = {"x-service-class": "interactive"}
    if objective_s is not None:
        headers["x-slo-tpot-ms"] = f"{objective_s * 1000:.0f}"
    first = last = 0.0
    tokens = 0
    with streaming(url, body, **headers) as opened:
        for event in opened:
            if b'"content":"' in event and b'"content":""' not in event:  # one token each: nothing is speculated here
                last = time.perf_counter()
                first = first or last
                tokens += 1
                if objective_s is not None and last - first > objective_s * (TOKENS - 1):
                    return (last - first) / (tokens - 1)
        assert opened.done, (opened.response.status_code, opened.error, opened.broken)
    return (last - first) / (TOKENS - 1)


def streams(urls: list[str], rounds: int, objective_s: float | None = None) -> list[float]:
    """`rounds` streams one after the other on each of STREAMS clients, who share the addresses evenly."""

    def client(number: int) -> list[float]:
        return [tpot_s(urls[number % len(urls)], objective_s) for _ in range(rounds)]

    with ThreadPoolExecutor(STREAMS) as pool:
        return [value for values in pool.map(client, range(STREAMS)) for value in values]


def long_prompt(url: str, client: httpx.Client) -> float:
    """Seconds that a long prompt took until its one token. No text: token ids, new to every cache."""
    ids = [random.randrange(300, 1000) for _ in range(LONG_PROMPT_TOKENS)]
    body = {"model": "tiny", "prompt": ids, "max_tokens": 1, "temperature": 0, "stream": True}
    begun = time.perf_counter()
    answer = client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - begun


@contextmanager
def long_prompts(front: Gateway, arm: Arm) -> Iterator[None]:
    """Clients that send the next one as soon as they have an answer."""
    stop = threading.Event()

    def client(_: int) -> int:
        count = 0
        with httpx.Client(timeout=300, verify=PLAIN) as http:
            while not stop.is_set():
                long_prompt(front.url, http)
                count += not stop.is_set()
        return count

    begun = time.perf_counter()
    with ThreadPoolExecutor(LONG_CLIENTS) as pool:
        counts = [pool.submit(client, n) for n in range(LONG_CLIENTS)]
        try:
            yield
        finally:
            arm.served_in_s += time.perf_counter() - begun
            stop.set()
    arm.served += sum(count.result() for count in counts)


def alone_s(replicas: Replicas) -> float:
    """Time per token of the streams with nothing beside them, now."""
    for i in range(len(replicas.urls)):
        replicas.wait_idle(i)
    return statistics.median(streams(replicas.urls, 1))


def objective_between(alone: float, replicas: Replicas) -> float:
    with httpx.Client(timeout=300, verify=PLAIN) as http:
        step_s = statistics.median(long_prompt(url, http) for url in replicas.urls for _ in range(3))
    say(f"time per token alone {alone * 1000:.0f} ms, beside a long prompt {step_s * 1000:.0f} ms")
    return float(alone * (step_s / alone) ** 0.4)


def take(name: str, replicas: Replicas, folder: Path, objective_s: float) -> Arm:
    """One arm's turn."""
    arm = Arm()
    with gateway(replicas.urls, folder, policy=name, config=PATIENT) as front, long_prompts(front, arm):
        arm.tpots_s = streams([front.url], ROUNDS, objective_s)
    say(
        f"{name}: {arm.within(objective_s)} of {len(arm.tpots_s)} streams within {objective_s * 1000:.0f} ms/token, "
        f"least {min(arm.tpots_s) * 1000:.0f}, median {statistics.median(arm.tpots_s) * 1000:.0f}, "
        f"most {max(arm.tpots_s) * 1000:.0f}; long prompts {arm.served / arm.served_in_s:.2f}/s"
    )
    return arm


def test_pacing_keeps_the_time_per_token_beside_long_prompts(replicas: Replicas, tmp_path: Path) -> None:
    within, streamed = {UNPACED: 0, PACED: 0}, 0
    turns = attempts = 0
    while turns < TURNS:
        attempts += 1
        assert attempts <= ATTEMPTS, "the machine is too restless: its speed changed during every turn"
        before = alone_s(replicas)
        objective_s = objective_between(before, replicas)
        alone, arms = [before], {}
        for name in within:
            arms[name] = take(name, replicas, tmp_path, objective_s)
            alone.append(alone_s(replicas))
        if max(alone) > STEADY * min(alone):
            say("not counted: alone " + ", then ".join(f"{a * 1000:.0f} ms" for a in alone) + " per token")
            continue
        turns += 1
        streamed += STREAMS * ROUNDS
        for name, arm in arms.items():
            within[name] += arm.within(objective_s)
            assert arm.served > 0
    assert within[PACED] >= 0.9 * streamed
    assert within[UNPACED] <= 0.25 * streamed  # a replica that by chance has no long prompt keeps it
