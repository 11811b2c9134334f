"""Late binding as it looks from outside: who is held, who goes when room appears, who is refused and when."""

from __future__ import annotations

import random

import pytest

from policies.classes import BATCH
from policies.core import Balancer
from policies.model import (
    Abort,
    Added,
    Decision,
    Dispatch,
    Ejected,
    Hold,
    Outcome,
    Pulse,
    Request,
    Returned,
    ServiceClass,
    Shed,
    Usage,
)
from policies.registry import make
from policies.settings import Settings

CHAT = ServiceClass("chat")
FIRM = ServiceClass("firm", sheddable=False)
RATE = 10_000.0  # tokens/s until something else is learnt


def balancer(*replicas: str, settings: Settings | None = None) -> Balancer:
    made = Balancer((CHAT, FIRM, BATCH), make("least_work"), settings or Settings(), random.Random(1))
    for name in replicas:
        made.fleet_event(Added(name, prefill_rate=RATE, kv_capacity_tokens=400_000), 0.0)
    return made


def chat(name: str, tokens: int = 10_000, at: float = 0.0, ttft_s: float = 5.0, **more: object) -> Request:
    return Request(
        name, service_class="chat", received_at=at, ttft_deadline=at + ttft_s, tpot_s=0.08, prompt_tokens=tokens, **more
    )  # type: ignore[arg-type]


def batch(name: str, tokens: int = 10_000, at: float = 0.0) -> Request:
    return Request(name, service_class="batch", received_at=at, deadline=at + 3600.0, prompt_tokens=tokens)


def said(decisions: list[Decision]) -> list[str]:
    words = {Dispatch: "send", Hold: "hold", Shed: "shed", Abort: "abort"}
    return [f"{words[type(d)]} {d.request_id}" for d in decisions]


def test_the_engine_gets_little_at_once_and_the_rest_waits_here() -> None:
    b = balancer("a")
    assert said(b.submit(chat("r1"), 0.0)) == ["send r1"]
    assert said(b.submit(chat("r2"), 0.0)) == ["hold r2"]
    assert said(b.first_token("r1", 1.0)) == ["send r2"]  # handed off at once


def test_room_that_appears_with_time_wakes_the_core() -> None:
    b = balancer("a")
    b.submit(chat("r1"), 0.0)
    b.submit(chat("r2"), 0.0)
    wake = b.next_wake()
    assert wake is not None
    assert 0.7 < wake < 0.8  # a quarter second of the first prefill is left
    assert said(b.wake(wake)) == ["send r2"]


def test_the_most_urgent_goes_first_and_a_cancelled_one_is_forgotten() -> None:
    b = balancer("a")
    b.submit(chat("first"), 0.0)
    b.submit(chat("later", ttft_s=9.0), 0.0)
    b.submit(chat("gone", ttft_s=4.0), 0.0)
    b.submit(chat("urgent", ttft_s=5.0), 0.0)
    assert b.cancel("gone", 0.1) == []
    assert said(b.first_token("first", 1.0)) == ["send urgent"]


def test_what_not_even_an_idle_replica_can_start_in_time_is_refused_at_arrival_and_told_not_to_retry() -> None:
    b = balancer("a")
    (shed,) = b.submit(chat("hopeless", tokens=60_000), 0.0)  # 6 s of prefill for an objective of 5 s
    assert isinstance(shed, Shed)
    assert (shed.request_id, shed.reason, shed.retry_after_s) == ("hopeless", "infeasible", None)
    assert shed.predicted_ttft_s == pytest.approx(6.0, rel=0.1)


def test_what_could_be_met_by_an_idle_replica_is_told_when_to_retry() -> None:
    b = balancer("a")
    b.submit(chat("long", tokens=40_000, ttft_s=9.0), 0.0)
    (hold,) = b.submit(chat("short", tokens=10_000, ttft_s=2.0), 0.0)
    assert isinstance(hold, Hold)
    (shed,) = b.wake(hold.until)
    assert isinstance(shed, Shed)
    assert shed.reason == "infeasible"
    assert shed.retry_after_s is not None
    assert shed.retry_after_s >= 0.8


def test_a_held_request_is_refused_at_its_latest_start_not_after_its_deadline() -> None:
    b = balancer("a")
    b.submit(chat("long", tokens=40_000, ttft_s=9.0), 0.0)
    (hold,) = b.submit(chat("short", tokens=10_000, ttft_s=2.0), 0.0)
    assert isinstance(hold, Hold)
    assert 0.5 < hold.until < 1.0  # 2 s less 1.2 x (1 s + overhead)
    assert b.wake(hold.until - 0.01) == []
    assert said(b.wake(hold.until)) == ["shed short"]


def test_a_class_that_may_not_be_shed_is_sent_late_rather_than_refused() -> None:
    b = balancer("a")
    b.submit(chat("long", tokens=40_000, ttft_s=9.0), 0.0)
    firm = chat("firm", tokens=10_000, ttft_s=2.0)
    firm.service_class = "firm"
    (hold,) = b.submit(firm, 0.0)
    assert isinstance(hold, Hold)
    assert said(b.wake(hold.until)) == ["send firm"]


def test_held_requests_survive_the_loss_of_the_replica_they_waited_for() -> None:
    b = balancer("a")
    b.submit(chat("r1"), 0.0)
    b.submit(chat("r2"), 0.0)
    assert b.fleet_event(Ejected("a"), 0.1) == []
    assert said(b.failed("r1", Outcome.ERROR, 0.1)) == ["shed r1"]  # tried the only one there is
    assert said(b.fleet_event(Returned("a"), 0.5)) == ["send r2"]


def test_who_was_let_in_and_failed_by_a_replica_is_answered_late_rather_than_not() -> None:
    b = balancer("a", "b")
    (first,) = b.submit(chat("r1", ttft_s=2.0), 0.0)
    assert isinstance(first, Dispatch)
    (again,) = b.failed("r1", Outcome.ERROR, 10.0)  # its engine hung; the two seconds are long over
    assert isinstance(again, Dispatch)
    assert {first.replica_id, again.replica_id} == {"a", "b"}
    assert said(b.failed("r1", Outcome.ERROR, 20.0)) == ["shed r1"]  # nobody is left to try


def test_who_waits_for_a_second_try_goes_when_its_time_is_over() -> None:
    b = balancer("a", "b")
    b.submit(chat("r1", tokens=1_000), 0.0)
    b.submit(chat("long1", tokens=40_000), 0.0)
    b.submit(chat("long2", tokens=40_000), 0.0)
    (hold,) = b.failed("r1", Outcome.ERROR, 0.1)
    assert isinstance(hold, Hold)
    sent = said(b.wake(hold.until))
    assert "send r1" in sent
    assert "shed r1" not in sent


def test_a_replica_that_says_it_is_full_is_left_alone_for_a_moment() -> None:
    b = balancer("a")
    b.submit(chat("r1"), 0.0)
    assert said(b.failed("r1", Outcome.BACKPRESSURE, 0.1)) == ["hold r1"]
    wake = b.next_wake()
    assert wake is not None
    assert 0.3 < wake < 0.4
    assert said(b.wake(wake)) == ["send r1"]


def test_prefill_waits_while_streams_run_near_their_objective() -> None:
    b = balancer("a")
    b.submit(chat("r1", tokens=1000), 0.0)
    b.first_token("r1", 0.1)
    b.pulse("a", Pulse(live=1, near=1, least_slack_s=0.005), 0.15)
    b.fleet.replicas["a"].pace.spend(1.0, 0.15)
    assert said(b.submit(chat("r2", at=0.2), 0.2)) == ["hold r2"]
    assert said(b.pulse("a", Pulse(live=1, near=0, least_slack_s=0.02), 0.25)) == ["send r2"]


def test_batch_fills_makes_way_before_its_first_byte_and_comes_back() -> None:
    b = balancer("a")
    assert said(b.submit(batch("night"), 0.0)) == ["send night"]
    assert said(b.submit(chat("r1", at=0.2), 0.2)) == ["abort night", "send r1"]
    assert b.fleet.replicas["a"].ledger.in_flight == 1
    assert said(b.first_token("r1", 1.2)) == ["send night"]


def test_batch_taken_back_stays_back_for_as_long_as_its_prefill_takes_and_then_is_woken_for() -> None:
    b = balancer("a")
    b.submit(batch("night"), 0.0)
    b.submit(chat("r1", tokens=1000, at=0.2), 0.2)
    assert b.first_token("r1", 0.3) == []  # a second of its work was thrown away at 0.2
    b.complete("r1", Outcome.SUCCESS, None, 0.4)
    assert b.next_wake() == 1.2
    assert said(b.wake(1.2)) == ["send night"]


def test_batch_taken_back_twice_is_left_to_finish() -> None:
    b = balancer("a")
    assert said(b.submit(batch("night"), 0.0)) == ["send night"]
    for at in (2.0, 4.0):
        name = f"r{at:g}"
        assert said(b.submit(chat(name, tokens=1000, at=at), at)) == ["abort night", f"send {name}"]
        b.first_token(name, at + 0.1)
        b.complete(name, Outcome.SUCCESS, None, at + 0.2)
        assert said(b.wake(at + 1.0)) == ["send night"]
    assert said(b.submit(chat("late", tokens=1000, at=5.1), 5.1)) == ["hold late"]
    assert said(b.first_token("night", 6.0)) == ["send late"]


def test_the_longest_prompt_is_tried_on_an_idle_fleet_without_the_margin_that_queues_need() -> None:
    """4.55 s are predicted for an objective of 5 s: 1.2 times that would be too much."""
    b = balancer("a")
    assert said(b.submit(chat("long", tokens=45_000), 0.0)) == ["send long"]
    (shed,) = b.submit(chat("another", tokens=45_000), 0.0)
    assert isinstance(shed, Shed)
    assert shed.retry_after_s is not None  # an idle fleet would take it
    b.first_token("long", 4.5)
    assert said(b.submit(chat("third", tokens=45_000, at=5.0), 5.0)) == ["send third"]


def test_the_longest_prompt_is_tried_where_there_is_room_though_it_would_harm_less_elsewhere() -> None:
    b = Balancer((CHAT, FIRM, BATCH), make("forebay"), Settings(prior_prefill_rate=RATE), random.Random(1))
    for name in ("a", "b"):
        b.fleet_event(Added(name, prefill_rate=RATE, kv_capacity_tokens=400_000), 0.0)
    for n in range(6):
        b.submit(chat(f"stream {n}", tokens=100, at=n / 10, pinned="b"), n / 10)
        b.first_token(f"stream {n}", n / 10 + 0.06)  # as predicted
    b.submit(chat("short", tokens=3000, at=1.0, pinned="a"), 1.0)  # 0.3 s: no room beside it
    (sent,) = b.submit(chat("long", tokens=45_000, at=1.0), 1.0)
    assert isinstance(sent, Dispatch)
    assert sent.replica_id == "b"


def waits_for_a(near_on_b: int) -> tuple[Balancer, Hold]:
    """One stream on a runs near its objective, six on b: a prompt harms least on a and waits for that one stream."""
    b = Balancer((CHAT, FIRM, BATCH), make("forebay"), Settings(prior_prefill_rate=RATE), random.Random(1))
    for name in ("a", "b"):
        b.fleet_event(Added(name, prefill_rate=RATE, kv_capacity_tokens=400_000), 0.0)
    for n, name in enumerate("abbbbbb"):
        b.submit(chat(f"stream {n}", tokens=100, at=n / 10, pinned=name), n / 10)
        b.first_token(f"stream {n}", n / 10 + 0.06)  # as predicted
    b.pulse("b", Pulse(live=6, near=near_on_b, least_slack_s=0.03), 1.0)
    b.pulse("a", Pulse(live=1, near=1, least_slack_s=0.001), 1.0)
    for name in ("a", "b"):
        b.fleet.replicas[name].pace.spend(3.0, 1.0)
    (hold,) = b.submit(chat("r", at=1.0), 1.0)
    assert isinstance(hold, Hold)
    now = 1.0
    while (now := now + 0.5) < hold.until:
        assert b.pulse("b", Pulse(live=6, near=near_on_b, least_slack_s=0.03), now) == []
        assert b.pulse("a", Pulse(live=1, near=1, least_slack_s=0.001), now) == []
    return b, hold


def test_who_waited_in_vain_where_it_would_harm_least_goes_elsewhere_before_it_is_refused() -> None:
    b, hold = waits_for_a(near_on_b=0)
    (sent,) = b.wake(hold.until)
    assert isinstance(sent, Dispatch)
    assert sent.replica_id == "b"


def test_who_finds_room_nowhere_at_its_latest_start_is_refused() -> None:
    b, hold = waits_for_a(near_on_b=6)
    assert said(b.wake(hold.until)) == ["shed r"]


def test_batch_waits_while_anyone_else_does() -> None:
    b = balancer("a")
    b.submit(chat("r1"), 0.0)
    assert said(b.submit(batch("night"), 0.0)) == ["hold night"]
    assert said(b.submit(chat("r2"), 0.0)) == ["hold r2"]
    assert said(b.first_token("r1", 1.0)) == ["send r2"]
    assert said(b.first_token("r2", 2.0)) == ["send night"]


def test_batch_fills_a_replica_that_nobody_waits_for() -> None:
    b = balancer("a", "b")
    for name in ("a", "b"):
        b.submit(chat(f"on {name}", pinned=name), 0.0)
    assert said(b.submit(chat("waits for a", pinned="a"), 0.0)) == ["hold waits for a"]
    assert said(b.submit(batch("night"), 0.0)) == ["hold night"]
    assert [r.awaited for r in b.fleet.replicas.values()] == [1, 0]
    assert said(b.first_token("on b", 0.5)) == ["send night"]
    assert said(b.first_token("on a", 1.0)) == ["send waits for a"]
    assert [r.awaited for r in b.fleet.replicas.values()] == [0, 0]


def test_batch_that_starves_gets_its_floor() -> None:
    b = balancer("a")
    b.submit(chat("r1"), 0.0)
    b.submit(batch("night"), 0.0)
    b.submit(chat("r2", ttft_s=60.0), 0.0)
    assert said(b.first_token("r1", 31.0)) == ["send night"]


def test_a_prompt_that_does_not_fit_the_kv_cache_waits_for_room() -> None:
    b = balancer("a")
    b.submit(chat("big", tokens=300_000, ttft_s=90.0), 0.0)
    b.first_token("big", 30.0)
    assert said(b.submit(chat("too", tokens=100_000, at=30.0, ttft_s=90.0), 30.0)) == ["hold too"]
    assert said(b.submit(chat("small", tokens=10_000, at=30.0), 30.0)) == ["send small"]
    b.first_token("small", 31.0)
    assert said(b.complete("big", Outcome.SUCCESS, Usage(300_000, 10, 0), 32.0)) == ["send too"]


def test_a_full_queue_refuses_and_says_so() -> None:
    b = balancer("a", settings=Settings(max_held=1))
    b.submit(chat("r1"), 0.0)
    b.submit(chat("r2"), 0.0)
    (shed,) = b.submit(chat("r3"), 0.0)
    assert isinstance(shed, Shed)
    assert shed.reason == "queue_full"


def test_a_request_whose_deadline_passes_in_mid_stream_is_stopped() -> None:
    b = balancer("a")
    request = chat("r1")
    request.deadline = 10.0
    b.submit(request, 0.0)
    b.first_token("r1", 1.0)
    assert b.next_wake() == 10.0
    assert b.wake(10.0) == [Abort("r1", "expired")]
    assert b.complete("r1", Outcome.EXPIRED, None, 10.0) == []


def test_everything_is_visible() -> None:
    b = balancer("a")
    b.submit(chat("r1"), 0.0)
    b.submit(chat("r2"), 0.0)
    seen = b.snapshot()
    assert (seen["held"], seen["open"]) == ({"chat": 1}, 2)
    assert seen["replicas"]["a"]["backlog_tokens"] == 10_000.0
    assert seen["replicas"]["a"]["parked_s"] == 1.0


def test_a_tenant_above_its_share_gets_what_the_others_leave_and_all_of_that() -> None:
    b = balancer("a")
    b.binding.prices.of("").set(1.0, 0.0)
    b.binding.prices.of("").exempt = frozenset({"modest"})  # as an overload by somebody else leaves it
    assert said(b.submit(chat("m1", tokens=2000, tenant="modest"), 0.1)) == ["send m1"]
    assert said(b.submit(chat("f1", tokens=1000, tenant="flood"), 0.1)) == ["hold f1"]
    assert said(b.submit(chat("m2", tokens=1000, tenant="modest"), 0.1)) == ["send m2"]
    assert b.first_token("m1", 0.3) == []
    assert said(b.first_token("m2", 0.4)) == ["send f1"]


def test_who_has_no_objective_cannot_be_late_and_is_refused_by_no_price() -> None:
    """Twenty prompts of half a second come each second to one replica: those without a deadline wait for their turn."""
    for ttft_s, refused in ((None, False), (60.0, True)):
        b = balancer("a")
        shed = 0
        for n in range(300):
            at = n / 20
            request = chat(f"r{n}", 5000, at, 0.0)
            request.ttft_deadline = None if ttft_s is None else at + ttft_s
            shed += sum(isinstance(d, Shed) for d in b.submit(request, at))
        assert (shed > 0) is refused
