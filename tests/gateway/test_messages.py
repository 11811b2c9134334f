"""What crosses between hands and the core arrives as it left."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import orjson
import pytest

from gateway import messages
from gateway.dumped import dumps
from gateway.gathered import Gathered
from gateway.messages import (
    To,
    decision,
    known_record,
    of_decision,
    of_record,
    of_request,
    of_usage,
    request,
    title,
    titled,
    unknown_record,
    usage,
)
from gateway.record import Attempt, RequestRecord, Tokens, TokenSource, Unmatched
from policies.model import Abort, Decision, Dispatch, Hold, Outcome, Prediction, Pulse, Request, Scraped, Shed, Usage
from policies.objectives import Objectives, Partition


def over_the_wire(value: Any) -> Any:
    return orjson.loads(dumps(value))


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
    """With a value of its own in each field that a hand writes."""
    made = RequestRecord("x-1", 10.0, service_class="batch", model="llama", tenant="t", prompt_bytes=99, chain=(5, 6))
    made.received_unix, made.endpoint, made.kind = 1.7e9, "/v1/chat/completions", "generate"
    made.adapter, made.session, made.arm, made.streams = "lora", "s", "b", False
    made.attempts = [
        Attempt("r0", 10.1, None, Outcome.ERROR, "reset"),
        Attempt("r1", 10.2, 10.4, Outcome.SUCCESS),
    ]
    made.prompt, made.completion = Tokens(25, TokenSource.USAGE), Tokens(7, TokenSource.EVENTS)
    made.cached = Tokens(None, TokenSource.ESTIMATE)
    made.objectives = Objectives(2.0, 0.1, 0.5, 60.0)
    made.client_retry, made.committed_at, made.first_content_at, made.last_content_at = 2, 10.3, 10.4, 10.9
    made.longest_gap_s, made.content_events, made.ended_at, made.status = 0.25, 6, 11.0, 200
    made.outcome, made.partition, made.reason = Outcome.SUCCESS, Partition.GOOD, "client_left"
    made.unmatched = Unmatched("uuid", "messages[0].content", 12, "f1", 300, 4)
    made.sample = b"\xff\x00body"
    made.choice_reason = "fallback"
    return made


def values(record: RequestRecord) -> dict[str, Any]:
    """Every field, also those that were never written, and what is derived from them."""
    known = {name: getattr(record, name) for name in dir(record) if not name.startswith("_")}
    assert len(known) > 40
    return {name: value for name, value in known.items() if not callable(value)}


def test_a_record_of_which_the_core_knows_nothing_arrives_whole() -> None:
    sent = finished()
    assert values(unknown_record(over_the_wire(of_record(sent, whole=True)))) == values(sent)


def test_a_record_is_put_together_from_both_sides() -> None:
    sent = finished()
    known = Request(
        "c.r1", "llama", "lora", "t", "s", "batch", "b", received_at=10.0, prompt_bytes=99, chain=(5, 6), streams=False
    )
    told = titled(over_the_wire(title(sent)), known)
    said = Dispatch("r1", "r1", "affinity", Prediction(0.5))
    got = known_record(over_the_wire(of_record(sent, whole=False)), told, said)
    expected = values(sent) | {"choice_reason": "affinity", "prediction": Prediction(0.5)}
    assert values(got) == expected


def test_of_a_request_whose_hand_is_gone_the_core_knows_what_it_was_told_at_first() -> None:
    known = Request("c.r1", "llama", None, "t", received_at=10.0, prompt_bytes=99, prompt_tokens=25, chain=(5, 6))
    made = titled(["x-1", 1.7e9, "/v1/completions", "generate"], known)
    assert (made.request_id, made.received_at, made.received_unix) == ("x-1", 10.0, 1.7e9)
    assert (made.model, made.tenant, made.chain, made.prompt) == ("llama", "t", (5, 6), Tokens(25))
    assert (made.outcome, made.attempts, made.status) == (None, [], 0)


def test_the_numbers_that_the_compiler_knows_are_those_of_the_enumeration() -> None:
    assert (messages.SUBMIT, messages.FIRST, messages.COMPLETE) == (To.SUBMIT, To.FIRST, To.COMPLETE)
    assert (messages.DISPATCH, messages.ABORT) == (To.DISPATCH, To.ABORT)


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
