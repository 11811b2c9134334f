"""Stories of simulated replicas: one dies, hangs, slows down, drains or restarts, and clients are told the truth."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path

import httpx
import pytest

from tests.serving import (
    CHAT,
    COUNTERS,
    PLAIN,
    Gateway,
    Stream,
    begun,
    chat,
    gateway,
    post,
    stream,
    streaming,
    wait_for,
)
from tests.simulated import Simulated, simulated

# Quick to see what is wrong, patient with a machine that is merely busy: a hung engine is told by its heartbeat.
QUICK = """
[timeouts]
first_event_s = 60.0
idle_s = 60.0
[scrape]
interval_s = 0.2
[health]
hang_s = 1.0
probe_interval_s = 0.2
backoff_s = 0.5
slow_start_s = 0.0
[retry]
budget_per_s = 100.0
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Simulated]:
    with simulated(tmp_path) as running:
        yield running


@pytest.fixture
def front(fleet: Simulated, tmp_path: Path) -> Iterator[Gateway]:
    with gateway(fleet.urls, tmp_path, policy="least_request", config=QUICK) as running:
        yield running


def idle(front: Gateway) -> bool:
    return all(front.metric(name) == 0 for name in COUNTERS)


def whole(answer: Stream) -> bool:
    return answer.broken is None and answer.error is None and answer.done and answer.finish in ("length", "stop")


def truncated(answer: Stream) -> bool:
    return answer.broken is None and answer.error is not None and not answer.done


def many(front: Gateway, count: int, tokens: int = 20) -> list[Stream]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda n: stream(front.url, chat(f"{n} of many", max_tokens=tokens)), range(count)))


@pytest.mark.parametrize("fault", ["kill", "crash"])
def test_a_dead_replica_cuts_its_streams_with_an_error_and_no_end_mark(
    front: Gateway, fleet: Simulated, fault: str
) -> None:
    with ExitStack() as stack:
        streams = begun(stack, front, 6, max_tokens=20_000)  # two on each, and none of them ends by itself
        fleet.order(0, fault)
        on = Counter(fleet.index(opened.replica) for opened, _ in streams)
        assert on == {0: 2, 1: 2, 2: 2}
        for opened, events in streams:
            if fleet.index(opened.replica) == 0:
                assert list(events)
                assert truncated(opened)
            else:
                assert all(b"choices" in event for event in islice(events, 3)), "the others go on"
    later = many(front, 9)
    assert all(whole(a) for a in later)
    assert 0 not in {fleet.index(a.replica) for a in later}
    wait_for(lambda: idle(front), "all counters at zero")


def test_a_hung_replica_is_left_although_its_health_is_fine(front: Gateway, fleet: Simulated) -> None:
    fleet.order(0, "hang")
    assert httpx.get(f"{fleet.urls[0]}/health", timeout=30, verify=PLAIN).status_code == 200
    assert all(whole(a) for a in many(front, 6))  # those that were sent there were tried elsewhere
    wait_for(lambda: front.metric("forebay_replica_available") == 2, "replica 0 is out")
    assert 0 not in {fleet.index(a.replica) for a in many(front, 9)}
    fleet.order(0, "clear")
    wait_for(lambda: front.metric("forebay_replica_available") == 3, "replica 0 is back")
    wait_for(lambda: idle(front), "all counters at zero")


def test_a_slow_replica_gets_less(front: Gateway, fleet: Simulated) -> None:
    fleet.order(0, "slow", factor=30.0)
    with ThreadPoolExecutor(6) as pool:
        replicas = Counter(
            fleet.index(a.replica)
            for answers in pool.map(lambda n: [stream(front.url, chat(f"{n}.{k}")) for k in range(10)], range(6))
            for a in answers
        )
    assert sum(replicas.values()) == 60
    assert replicas[0] < min(replicas[1], replicas[2])


def test_a_draining_replica_is_no_black_hole(front: Gateway, fleet: Simulated) -> None:
    """Its instant empty answers would make it the fastest of all."""
    fleet.order(0, "drain")
    answers = many(front, 12)
    assert all(whole(a) for a in answers)
    plain = [post(front.url, chat(f"plain {n}")).json() for n in range(4)]
    assert {a["choices"][0]["finish_reason"] for a in plain} <= {"length", "stop"}
    wait_for(lambda: front.metric("forebay_replica_available") == 2, "replica 0 is out")
    wait_for(lambda: idle(front), "all counters at zero")


def test_a_restarted_replica_is_noticed_and_used(front: Gateway, fleet: Simulated) -> None:
    assert all(whole(a) for a in many(front, 6))
    fleet.order(0, "restart")
    wait_for(lambda: front.metric("forebay_restarts_total") == 1, "the restart is noticed")
    wait_for(lambda: 0 in {fleet.index(a.replica) for a in many(front, 6)}, "replica 0 works again")


def test_answers_that_break_off_are_never_glued(front: Gateway, fleet: Simulated) -> None:
    """After the first byte there is no silent retry: the text is a prefix of one replica's answer, and an error."""
    for i in range(3):
        fleet.order(i, "cut", after=5)
    answers = many(front, 6)
    assert all(truncated(a) for a in answers)
    assert all(a.text.count(" ") < 20 for a in answers)
    for i in range(3):
        fleet.order(i, "clear")
    wait_for(lambda: all(whole(a) for a in many(front, 3)), "the fleet is well again")


def test_after_chaos_nothing_is_left_over(front: Gateway, fleet: Simulated) -> None:
    """Streams, plain requests, clients that leave, and a fault every few requests: in the end every counter is zero."""
    rng = random.Random(7)

    def one(n: int) -> None:
        kind = rng.randrange(4)
        if kind == 0:
            with streaming(front.url, chat(f"leave {n}", max_tokens=300)) as opened:
                for _ in zip(range(rng.randrange(4)), opened, strict=False):
                    pass
        elif kind == 1:
            with suppress(httpx.TimeoutException):
                httpx.post(front.url + CHAT, json=chat(f"hasty {n}", max_tokens=300), timeout=0.05, verify=PLAIN)
        elif kind == 2:
            post(front.url, chat(f"plain {n}", max_tokens=30))
        else:
            stream(front.url, chat(f"stream {n}", max_tokens=60))

    with ThreadPoolExecutor(12) as pool:
        jobs = []
        for n in range(120):
            if n % 10 == 5:
                i, fault = rng.randrange(2), rng.choice(["cut", "error", "hang", "slow", "refuse", "unhealthy"])
                fleet.order(i, fault, for_s=0.5, count=2)
            jobs.append(pool.submit(one, n))
        for job in jobs:
            job.result(timeout=120)
    for i in range(3):
        fleet.order(i, "clear")
    wait_for(lambda: idle(front), "all counters at zero")
    wait_for(lambda: front.metric("forebay_replica_available") == 3, "all replicas are back")
    assert all(whole(a) for a in many(front, 6))
