"""The end of a request: objectives, tokens with their source, and where it counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import timeline
from gateway.endpoints import Kind
from gateway.record import RequestRecord, Tokens, TokenSource
from policies.model import Outcome, Prediction, Request, ServiceClass, Usage
from policies.objectives import Objectives

CLASS = ServiceClass("chat", ttft_s=2.0, ttft_s_per_token=0.001, tpot_s=0.1)


def request(**more: object) -> Request:
    return Request("r", prompt_tokens=1000, received_at=50.0, tpot_s=0.08, itl_s=0.5, deadline=80.0, **more)  # type: ignore[arg-type]


def ended(**more: object) -> RequestRecord:
    """A stream: received at 100 s, dispatched at 100.5 s, first content at 101 s, last at 102 s, end at 102.5 s."""
    record = RequestRecord("r", 100.0)
    record.attempt("a", 100.5)
    record.first_content_at, record.last_content_at, record.ended_at = 101.0, 102.0, 102.5
    record.content_events, record.outcome, record.completion = 11, Outcome.SUCCESS, Tokens(11)
    for name, value in more.items():
        setattr(record, name, value)
    return record


def test_objectives_grow_with_the_true_prompt_and_are_relative_to_receipt() -> None:
    assert timeline.objectives(request(), CLASS, None) == Objectives(3.0, 0.08, 0.5, 30.0)
    assert timeline.objectives(request(), CLASS, None, prompt_tokens=4000) == Objectives(6.0, 0.08, 0.5, 30.0)


def test_an_asked_ttft_only_tightens() -> None:
    assert timeline.objectives(request(), CLASS, 1.0).ttft_s == 1.0
    assert timeline.objectives(request(), CLASS, 9.0).ttft_s == 3.0
    free = ServiceClass("batch", ttft_s=None)
    assert timeline.objectives(request(), free, None).ttft_s is None
    assert timeline.objectives(request(), free, 9.0).ttft_s == 9.0


def test_tokens_come_from_usage_where_there_is_one() -> None:
    record = ended()
    timeline.tokens(record, Usage(900, 33, 512), tokens_per_event=3.0, estimate=1000)
    assert [(t.count, t.source) for t in (record.prompt, record.completion, record.cached)] == [
        (900, TokenSource.USAGE),
        (33, TokenSource.USAGE),
        (512, TokenSource.USAGE),
    ]


def test_without_usage_they_are_events_estimates_and_beliefs() -> None:
    record = ended(prediction=Prediction(cached_tokens=256))
    timeline.tokens(record, None, tokens_per_event=3.0, estimate=1000)
    assert [(t.count, t.source) for t in (record.prompt, record.completion, record.cached)] == [
        (1000, TokenSource.ESTIMATE),
        (33, TokenSource.EVENTS),
        (256, TokenSource.ESTIMATE),
    ]


def test_half_a_usage_is_completed_from_the_rest() -> None:
    record = ended()
    timeline.tokens(record, Usage(900, None, None), tokens_per_event=1.0, estimate=1000)
    assert (record.prompt.count, record.completion.count, record.completion.source) == (900, 11, TokenSource.EVENTS)
    assert record.cached.count is None


def test_what_generates_nothing_has_no_completion_and_no_answer_has_none() -> None:
    for kind, count in ((Kind.GENERATE, 0), (Kind.POOL, None)):
        record = ended(content_events=0, kind=kind)
        timeline.tokens(record, None, 1.0, 10)
        assert record.completion.count == count


@given(st.integers(1, 10_000), st.floats(0.1, 64.0))
def test_an_event_is_at_least_a_token(events: int, per_event: float) -> None:
    record = ended(content_events=events)
    timeline.tokens(record, None, per_event, 10)
    assert record.completion.count is not None
    assert record.completion.count >= events


@pytest.mark.parametrize(
    ("bounds", "partition"),
    [
        (Objectives(1.0, 0.1, 0.5, 2.5), "good"),
        (Objectives(0.9, 0.1, 0.5, 2.5), "slow_ttft"),
        (Objectives(1.0, 0.09, 0.5, 2.5), "slow_tpot"),
        (Objectives(1.0, 0.1, 0.1, 2.5), "slow_itl"),
        (Objectives(1.0, 0.1, 0.5, 2.4), "slow_e2e"),
        (Objectives(None, None, None, None), "good"),
    ],
)
def test_a_complete_answer_is_judged_by_its_objectives(bounds: Objectives, partition: str) -> None:
    assert timeline.partition(ended(objectives=bounds, longest_gap_s=0.2)) == partition


@pytest.mark.parametrize(
    ("outcome", "reason", "partition"),
    [
        (Outcome.CLIENT_ERROR, "http_400", "error_http"),
        (Outcome.CANCELLED, "client_left", "abandoned"),
        (Outcome.CANCELLED, "client_stalled", "abandoned"),
        (Outcome.SHED, "infeasible", "rejected"),
        (Outcome.EXPIRED, "expired", "slow_e2e"),
        (Outcome.BACKPRESSURE, "http_503", "rejected"),
        (Outcome.TRUNCATED, "reset", "truncated"),
        (Outcome.ERROR, "http_500", "error_http"),
        (Outcome.ERROR, "internal", "error_http"),
        *[(Outcome.ERROR, reason, "error_transport") for reason in sorted(timeline.TRANSPORT)],
    ],
)
def test_what_did_not_succeed_counts_by_its_outcome(outcome: Outcome, reason: str, partition: str) -> None:
    assert timeline.partition(ended(outcome=outcome, reason=reason)) == partition


def test_our_response_headers_tell_the_wait_here_and_there_in_milliseconds() -> None:
    assert ended(choice_reason="affinity").own_lines(b"id-1", 101.25).split(b"\r\n") == [
        b"x-request-id: id-1",
        b"x-forebay-replica: a",
        b"x-forebay-reason: affinity",
        b"x-forebay-queue-ms: 500.0",
        b"server-timing: queue;dur=500.0, upstream;dur=750.0",
        b"",
    ]
