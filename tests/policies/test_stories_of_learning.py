"""What a handful of first tokens may and may not teach: bursts of short prompts, cold starts, replicas nobody used."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from itertools import count

import pytest

from policies.core import Balancer
from policies.model import Added, Decision, Dispatch, Outcome, Request, ServiceClass, Shed
from policies.predictor import PrefillFit
from policies.registry import make
from policies.settings import Settings
from tests.policies.play import Play

CHAT = ServiceClass("chat")


def forebay(*replicas: str) -> Balancer:
    made = Balancer((CHAT,), make("forebay"), Settings(), random.Random(1))
    for name in replicas:
        made.fleet_event(Added(name), 0.0)
    return made


def chat(name: str, tokens: int, at: float, ttft_s: float = 10.0) -> Request:
    return Request(name, service_class="chat", received_at=at, ttft_deadline=at + ttft_s, prompt_tokens=tokens)


def test_short_prompts_tell_of_latency_and_not_of_the_rate() -> None:
    fit = PrefillFit(8000.0, 0.05)
    for _ in range(30):
        fit.add(10, 50, 0.2, None)
    assert fit.overhead_s == pytest.approx(0.2, rel=0.05)
    assert 5000 < fit.rate < 12_000


def test_long_prompts_of_one_length_tell_of_the_rate() -> None:
    fit = PrefillFit(8000.0, 0.05)
    for _ in range(30):
        fit.add(8000, 8000 * 4000, 4.0, None)
    assert 1900 < fit.rate < 2200


def test_prompts_that_queued_tell_the_rate_apart_from_the_latency_even_at_one_length() -> None:
    fit = PrefillFit(8000.0, 0.05)
    for n in range(60):
        first = n % 2 == 0  # 0.3 s of latency before the first of two, then a quarter second each
        fit.add(1000, 1000 * 500, 0.55 if first else 0.25, None, latency=first)
    assert fit.overhead_s == pytest.approx(0.3, abs=0.02)
    assert fit.seconds(1000, 0) == pytest.approx(0.25, abs=0.02)


def test_a_slow_first_sample_is_soon_forgotten() -> None:
    fit = PrefillFit(8000.0, 0.05)
    fit.add(1000, 1000 * 500, 5.0, None)  # kernels are compiled on first use
    for _ in range(8):
        fit.add(1000, 1000 * 500, 0.15, None)
    assert fit.overhead_s + fit.seconds(1000, 0) < 0.4


@pytest.mark.parametrize("latency_s", [0.02, 0.2, 0.6])
def test_a_burst_of_short_prompts_is_batched_by_the_replicas_and_not_refused(latency_s: float) -> None:
    """2,000 prompts of 10 tokens in 4 s on two replicas that answer each after the same latency, however many."""
    b, sent, shed = forebay("a", "b"), Counter[str](), 0
    events: list[tuple[float, int, str, str]] = []

    def follow(decisions: list[Decision], now: float) -> None:
        nonlocal shed
        for decision in decisions:
            if isinstance(decision, Dispatch):
                sent[decision.replica_id] += 1
                heapq.heappush(events, (now + latency_s, len(sent), "first", decision.request_id))
            shed += isinstance(decision, Shed)

    for n in range(20):  # twenty at once, as a warm-up does
        heapq.heappush(events, (0.0, 0, "arrive", f"w{n}"))
    for n in range(2000):
        heapq.heappush(events, (3.0 + n * 0.002, 0, "arrive", f"r{n}"))
    wake: float | None = None
    while events or wake is not None:
        if wake is not None and (not events or wake < events[0][0]):
            now = wake
            follow(b.wake(now), now)
        else:
            now, _, kind, name = heapq.heappop(events)
            if kind == "arrive":
                follow(b.submit(chat(name, 10, now), now), now)
            elif kind == "first":
                follow(b.first_token(name, now), now)
                heapq.heappush(events, (now + 20.0, 0, "end", name))
            else:
                follow(b.complete(name, Outcome.SUCCESS, None, now), now)
        wake = b.next_wake()
    assert shed == 0
    assert sent["a"] + sent["b"] == 2020
    assert min(sent.values()) > 600


def test_one_slow_answer_does_not_send_everything_to_the_replica_nobody_knows() -> None:
    b = forebay("a", "b")
    (first,) = b.submit(chat("r0", 2000, 0.0), 0.0)
    assert isinstance(first, Dispatch)
    b.first_token("r0", 4.0)
    b.complete("r0", Outcome.SUCCESS, None, 4.5)
    a, other = (b.fleet.replicas[name].prefill for name in ("a", "b"))
    assert other.seconds(2000, 0) == pytest.approx(a.seconds(2000, 0), rel=0.2)
    now = 10.0
    for n in range(1, 21):  # from here on both take a third of a second
        (decision,) = b.submit(chat(f"r{n}", 2000, now), now)
        assert isinstance(decision, Dispatch)
        b.first_token(f"r{n}", now + 0.33)
        b.complete(f"r{n}", Outcome.SUCCESS, None, now + 0.5)
        now += 1.0
    assert other.seconds(2000, 0) == pytest.approx(a.seconds(2000, 0), rel=0.35)
    pair = [d for n in (21, 22) for d in b.submit(chat(f"r{n}", 2000, now), now)]
    assert {d.replica_id for d in pair if isinstance(d, Dispatch)} == {"a", "b"}


def test_a_replica_that_joins_a_slow_fleet_is_not_believed_to_be_fast() -> None:
    b, now = forebay("a"), 0.0
    for n in range(20):
        b.submit(chat(f"r{n}", 2000, now), now)
        b.first_token(f"r{n}", now + 2.0)
        b.complete(f"r{n}", Outcome.SUCCESS, None, now + 2.5)
        now += 3.0
    b.fleet_event(Added("new"), now)
    b.fleet_event(Added("told", prefill_rate=50_000.0), now)
    known, new, told = (b.fleet.replicas[name].prefill.seconds(2000, 0) for name in ("a", "new", "told"))
    assert new == pytest.approx(known, rel=0.1)
    assert told == pytest.approx(0.04)


def test_whole_answers_that_come_early_teach_that_the_replica_is_faster() -> None:
    """Whole answers show no first token; held to the prior of 8,000 tokens/s a fleet that serves only these refused
    nine of ten requests it could have served."""
    balancer, out, refused = forebay("r"), [], 0
    for n in range(400):  # 8,000 tokens each, one every 20 ms: 50 times the prior, which would be far behind at once
        now, request = n * 0.02, chat(str(n), 8_000, n * 0.02)
        request.streams = False
        decisions = balancer.submit(request, now)
        refused += any(isinstance(d, Shed) for d in decisions)
        out += [d.request_id for d in decisions if isinstance(d, Dispatch)]
        while out:
            decisions = balancer.complete(out.pop(0), Outcome.SUCCESS, None, now + 0.02)
            out += [d.request_id for d in decisions if isinstance(d, Dispatch)]
    assert refused == 0
    assert balancer.fleet.replicas["r"].prefill.rate > 100_000.0


def closed_loop(latency_s: float, clients: int, turn_s: float, seconds: int) -> tuple[int, int]:
    """So many clients send their next prompt of 30 tokens 1 ms after an answer or 2 ms after a refusal, to two replicas
    that answer each after about this latency, however many are out. First tokens are heard of at the turns of an event
    loop. Answers how many were served and refused in the second half."""
    b, rng = forebay("a", "b"), random.Random(3)
    served, refused, numbers = 0, 0, count()

    def arrive(at: float) -> None:
        name = f"r{next(numbers)}"
        play.at(at, lambda now: play.follow(b.submit(chat(name, 30, now), now), now))

    def answer(name: str, now: float) -> None:
        nonlocal served
        play.follow(b.first_token(name, now), now)
        play.follow(b.complete(name, Outcome.SUCCESS, None, now), now)
        served += now > seconds / 2
        arrive(now + 0.001)

    def each(decision: Decision, now: float) -> None:
        nonlocal refused
        if isinstance(decision, Dispatch):
            name = decision.request_id
            turn = int((now + latency_s * rng.uniform(0.5, 1.5)) / turn_s) + 1
            play.at(turn * turn_s, lambda now: answer(name, now))
        elif isinstance(decision, Shed):
            refused += now > seconds / 2
            arrive(now + 0.002)

    play = Play(b, each)
    for n in range(clients):
        arrive(n * 1e-4)
    play.run(seconds)
    return served, refused


@pytest.mark.parametrize(("clients", "turn_s", "least"), [(32, 0.01, 9500), (32, 0.005, 10_500), (16, 0.02, 4000)])
def test_replicas_that_a_closed_loop_keeps_busy_are_not_believed_to_be_full(
    clients: int, turn_s: float, least: int
) -> None:
    """Something is always out, so the time between first tokens looks like work however much more could be done, and
    those heard of in the same turn taught nothing: most were refused, and after some seconds all."""
    served, refused = closed_loop(0.02, clients, turn_s, 16)
    assert served >= least
    assert refused <= served // 20
