"""What a failed attempt means, and how many may be repeated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import retry
from gateway.retry import RetryBudget, of_error_event, of_status, told
from gateway.signals import HARD, SOFT, Sign
from policies.model import Outcome

DEAD = b"EngineCore encountered an issue. See stack trace (above) for the root cause."


@pytest.mark.parametrize(
    ("status", "body", "detail", "outcome", "sign", "again"),
    [
        (400, b"", "http_400", "client_error", Sign.CLIENT_ERROR, False),
        (404, b"", "http_404", "client_error", Sign.CLIENT_ERROR, False),
        (422, b"", "http_422", "client_error", Sign.CLIENT_ERROR, False),
        (429, b"", "http_429", "backpressure", Sign.BACKPRESSURE, True),
        (503, b"", "http_503", "backpressure", Sign.BACKPRESSURE, True),
        (500, b"", "http_500", "error", Sign.ERROR_STATUS, False),  # it may be the request's fault
        (500, DEAD, "engine_dead", "error", Sign.ENGINE_DEAD, True),
        (500, b'{"message":"EngineDeadError"}', "engine_dead", "error", Sign.ENGINE_DEAD, True),
        (502, b"", "http_502", "error", Sign.ERROR_STATUS, True),
        (504, b"", "http_504", "error", Sign.ERROR_STATUS, False),
        (799, b"", "http_5xx", "error", Sign.ERROR_STATUS, False),
    ],
)
def test_what_a_status_says(status: int, body: bytes, detail: str, outcome: str, sign: Sign, again: bool) -> None:
    failure = of_status(status, body)
    assert failure is not None
    assert (failure.detail, failure.outcome, failure.sign, failure.retriable) == (detail, outcome, sign, again)


@given(st.integers(100, 399), st.binary(max_size=20))
def test_nothing_below_400_is_a_failure(status: int, body: bytes) -> None:
    assert of_status(status, body) is None


def test_users_mistakes_and_full_queues_are_no_illness() -> None:
    for status in (400, 401, 404, 413, 429, 503):
        failure = of_status(status, b"")
        assert failure is not None
        assert failure.sign not in HARD | SOFT


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        ({"code": 503, "message": "busy"}, 503, "http_503"),
        ({"code": 400, "message": "too long"}, 400, "http_400"),
        ({"code": 500, "message": "odd"}, 500, "error_event"),
        ({"code": 500, "message": DEAD.decode()}, 500, "engine_dead"),
        ({"code": "server_error"}, 500, "error_event"),  # Responses name their errors
        ({}, 500, "error_event"),
        ({"code": 7}, 500, "error_event"),
    ],
)
def test_an_error_event_carries_the_status_it_would_have_been(
    error: dict[str, object], status: int, detail: str
) -> None:
    found, failure = of_error_event(error)
    assert (found, failure.detail) == (status, detail)


def test_the_budget_starts_full_and_is_earned_by_requests() -> None:
    budget = RetryBudget(share=0.25, per_s=0.0)
    assert [budget.take(0.0) for _ in range(11)] == [True] * 10 + [False]
    for _ in range(4):
        budget.request()
    assert [budget.take(0.0) for _ in range(2)] == [True, False]


def test_the_budget_is_earned_by_time_and_never_above_its_burst() -> None:
    budget = RetryBudget(share=0.0, per_s=2.0)
    assert sum(budget.take(0.0) for _ in range(20)) == 10
    assert sum(budget.take(1.5) for _ in range(20)) == 3
    assert sum(budget.take(1000.0) for _ in range(20)) == 10
    budget.give_back()
    assert [budget.take(1000.0) for _ in range(2)] == [True, False]


@given(st.floats(0, 1), st.floats(0, 5), st.lists(st.tuples(st.booleans(), st.floats(0, 2)), max_size=100))
def test_retries_never_exceed_burst_share_and_rate(share: float, per_s: float, steps: list[tuple[bool, float]]) -> None:
    budget, now, requests, taken = RetryBudget(share, per_s), 0.0, 0, 0
    for request, gap in steps:
        now += gap
        if request:
            budget.request()
            requests += 1
        else:
            taken += budget.take(now)
    assert taken <= 10 + share * requests + per_s * now + 1e-6


@pytest.mark.parametrize(
    ("failure", "status", "code", "message"),
    [
        (retry.EXPIRED, 504, "expired", "the deadline of this request has passed"),
        (retry.DRAINING, 503, "draining", "the gateway is shutting down"),
        (retry.ABORT, 502, "upstream", "the replica is shutting down and gave the request up"),
        (retry.IDLE_TIMEOUT, 502, "upstream", "the replica stopped in the middle of its answer"),
        (retry.EARLY_END, 502, "upstream", "the replica's answer broke off"),
        (of_status(503, b""), 503, "no_replica", "every replica tried refused new work"),
    ],
)
def test_what_a_client_is_told(failure: retry.Failure, status: int, code: str, message: str) -> None:
    error = told(failure)
    assert (error.status, error.code, error.message) == (status, code, message)


def test_every_refusal_of_ours_has_an_outcome() -> None:
    assert {code: str(outcome) for code, outcome in retry.OF_CODE.items()} == {
        "infeasible": "shed", "queue_full": "shed", "over_quota": "shed", "no_replica": "shed", "draining": "shed",
        "expired": "expired", "upstream": "error", "internal": "error",
    }  # fmt: skip
    assert retry.OF_CODE["infeasible"] is Outcome.SHED  # type: ignore[index]
