"""What crosses between hands and the core arrives as it left."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import orjson
import pytest

from gateway.gathered import Gathered
from gateway.messages import To, decision, of_decision, of_record, of_request, of_usage, record, request, usage
from gateway.record import RequestRecord, Tokens, TokenSource
from policies.model import Abort, Decision, Dispatch, Hold, Outcome, Prediction, Pulse, Request, Scraped, Shed, Usage
from policies.objectives import Objectives, Partition


def over_the_wire(value: Any) -> Any:
    return orjson.loads(orjson.dumps(value))


def test_a_request_arrives_with_everything_but_its_text() -> None:
    sent = Request(
        "r1", "llama", "lora", "tenant", "session", "batch", "arm", 1.5, 2.5, 0.1, 0.5, 60.0, 4096, 1024,
        (2**64 - 1, 7), lambda: "text", 100, 200, False, True, {"r0": 8}, 2.0, "r0",
    )  # fmt: skip
    got = request("c.r1", over_the_wire(of_request(sent)))
    kept = [f.name for f in fields(Request) if f.name not in ("id", "text", "group")]
    assert {name: getattr(got, name) for name in kept} == {name: getattr(sent, name) for name in kept}
    assert got.id == "c.r1"
    assert got.text is None


@pytest.mark.parametrize(
    "sent",
    [
        Dispatch("r1", "replica", "affinity", Prediction(0.5, 0.02, 100, 900, 0.3)),
        Dispatch("r1", "replica", "turn"),
        Shed("r1", "infeasible", 2.5),
        Shed("r1", "infeasible", None),
        Shed("r1", "infeasible", None, 0.35),
        Abort("r1", "expired"),
        Abort("r1", "preempted", requeue=True),
    ],
)
def test_a_decision_arrives_as_it_was_made(sent: Decision) -> None:
    assert decision(over_the_wire(of_decision("r1", sent))) == sent


def test_of_a_hold_only_the_fact_arrives() -> None:
    got = decision(over_the_wire(of_decision("r1", Hold("r1", float("inf")))))
    assert isinstance(got, Hold)


def finished() -> RequestRecord:
    made = RequestRecord("x-1", 10.0, service_class="batch", model="llama", tenant="t", prompt_bytes=99, chain=(5, 6))
    attempt = made.attempt("r0", 10.2)
    attempt.t_first, attempt.outcome, attempt.detail = 10.4, Outcome.SUCCESS, ""
    made.prompt, made.cached = Tokens(25, TokenSource.USAGE), Tokens(None, TokenSource.ESTIMATE)
    made.objectives = Objectives(2.0, 0.1, None, None)
    made.outcome, made.partition, made.ended_at, made.status = Outcome.SUCCESS, Partition.GOOD, 11.0, 200
    made.sample = b"\xff\x00body"
    return made


@pytest.mark.parametrize("whole", [True, False])
def test_a_record_is_put_together_from_both_sides(whole: bool) -> None:
    sent = finished()
    known = None if whole else Request("c.r1", "llama", None, "t", None, "batch", received_at=10.0, prompt_bytes=99)
    if known is not None:
        known.chain = (5, 6)
    last = None if whole else Dispatch("r1", "r0", "affinity", Prediction(0.5))
    got = record(over_the_wire(of_record(sent, whole)), known, last)
    assert got.partition is Partition.GOOD
    assert got.attempts == sent.attempts
    assert (got.prompt, got.cached, got.objectives) == (sent.prompt, sent.cached, sent.objectives)
    assert (got.received_at, got.service_class, got.model, got.tenant) == (10.0, "batch", "llama", "t")
    assert (got.chain, got.prompt_bytes, got.sample) == ((5, 6), 99, b"\xff\x00body")
    assert got.choice_reason == ("" if whole else "affinity")


def test_usage_arrives_or_is_none() -> None:
    assert usage(over_the_wire(of_usage(Usage(1, None, 3)))) == Usage(1, None, 3)
    assert usage(over_the_wire(of_usage(None))) is None
    assert len(set(To)) == len(To)


def test_the_pulses_of_all_hands_become_one() -> None:
    meter = Gathered("r0")
    assert not meter.stirred
    meter.heard(1, 10, Pulse(3, 1, 0.02, 8, 0.16, 2, 0.4), now=1.0)
    meter.heard(2, 5, Pulse(2, 0, 0.05, 5, 0.1, 0, 0.0), now=1.02)
    assert meter.stirred
    made = meter.pulse(1.03)
    assert (made.live, made.near, made.least_slack_s) == (5, 1, 0.02)
    assert (made.idle_gaps, made.busy_gaps) == (13, 2)
    assert meter.pulse(1.08) == Pulse(5, 1, 0.02), "streams live on; their gaps are told once"
    meter.forget(1)
    assert meter.pulse(1.1).live == 2
    assert meter.pulse(2.0) == Pulse(), "a hand that says nothing counts no more"
    meter.scraped(Scraped("r0", generation_tokens=0.0))
    meter.heard(2, 100, Pulse(2, 0, 0.05), now=3.0)
    meter.scraped(Scraped("r0", generation_tokens=400.0))
    assert meter.tokens_per_event == 4.0
