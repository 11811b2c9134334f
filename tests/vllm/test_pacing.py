"""Long prompts beside streams on two real replicas: pacing keeps the streams' time per token, its absence does not.

The objective comes from this machine: three times the mean time per token that the same streams have alone. Long
prompts, each new to every cache, are offered faster than both replicas together can prefill them, so that without
pacing every engine step carries prefill work and each token waits for one.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.serving import Gateway, chat, gateway, streaming
from tests.vllm.replicas import Replicas, say

STREAMS, TOKENS, ROUNDS = 6, 100, 6
LONG_PROMPT_TOKENS, LONG_PER_S = 3000, 3.0
FACTOR = 3.0


def tpot_s(front: Gateway, headers: dict[str, str]) -> float | None:
    """Mean time per token of one stream as its client sees it; None if it was refused."""
    body = chat(f"a short question {random.random()}", max_tokens=TOKENS, stream_options={"include_usage": True})
    with streaming(front.url, body, **headers) as opened:
        stamps = [time.perf_counter() for e in opened if b'"content":"' in e and b'"content":""' not in e]
        if opened.response.status_code == 429:
            return None
        assert opened.done, (opened.response.status_code, opened.error)
        assert opened.usage is not None
        return (stamps[-1] - stamps[0]) / (opened.usage["completion_tokens"] - 1)


def streams(front: Gateway, rounds: int, headers: dict[str, str]) -> list[float | None]:
    """`rounds` streams one after the other on each of STREAMS clients."""

    def client(_: int) -> list[float | None]:
        return [tpot_s(front, headers) for _ in range(rounds)]

    with ThreadPoolExecutor(STREAMS) as pool:
        return [value for values in pool.map(client, range(STREAMS)) for value in values]


@contextmanager
def long_prompts(front: Gateway) -> Iterator[list[int]]:
    """Offers them at a fixed rate until the block ends; yields the statuses so far."""
    stop, statuses = threading.Event(), list[int]()

    def one(number: int) -> None:
        rng = random.Random(f"{time.time_ns()}-{number}")
        ids = [rng.randrange(300, 1000) for _ in range(LONG_PROMPT_TOKENS)]
        body = {"model": "tiny", "prompt": ids, "max_tokens": 2, "temperature": 0, "stream": True}
        try:
            statuses.append(httpx.post(f"{front.url}/v1/completions", json=body, timeout=60).status_code)
        except httpx.TransportError:
            statuses.append(0)

    def offer() -> None:
        begun, number = time.monotonic(), 0
        with ThreadPoolExecutor(64) as pool:
            while not stop.wait(max(0.0, begun + number / LONG_PER_S - time.monotonic())):
                pool.submit(one, number)
                number += 1

    thread = threading.Thread(target=offer)
    thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        thread.join()


def attained(front: Gateway, objective_s: float) -> tuple[float, float, list[int]]:
    """(share of streams within the objective, median time per token, statuses of the long prompts) under the mix."""
    headers = {"x-service-class": "interactive", "x-slo-tpot-ms": str(round(objective_s * 1000))}
    with long_prompts(front) as statuses:
        streams(front, 2, headers)  # the controller learns
        values = [value for value in streams(front, ROUNDS, headers) if value is not None]
    return sum(v <= objective_s for v in values) / len(values), statistics.median(values), statuses


def test_pacing_keeps_the_time_per_token_beside_long_prompts(replicas: Replicas, tmp_path: Path) -> None:
    with gateway(replicas.urls, tmp_path, policy="least_request") as front:
        alone_s = statistics.median(v for v in streams(front, 2, {}) if v is not None)
    objective_s = FACTOR * alone_s
    shares = {}
    for policy in ("forebay+admission", "forebay"):
        replicas.all_alive()
        with gateway(replicas.urls, tmp_path, policy=policy) as front:
            share, median_s, statuses = attained(front, objective_s)
        shares[policy] = share
        served = statuses.count(200)
        say(
            f"{policy}: {share:.0%} of streams within {objective_s * 1000:.0f} ms per token, "
            f"median {median_s * 1000:.0f}; long prompts served {served} of {len(statuses)}"
        )
        assert served > 0
    assert shares["forebay"] >= 0.9
    assert shares["forebay+admission"] <= 0.5
