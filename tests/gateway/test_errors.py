"""Every refusal in the form that the endpoint's own clients parse."""

from __future__ import annotations

import random

import orjson
import pytest

from gateway import errors
from gateway.errors import FORMS, Api, Code, GatewayError


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_a_status_and_a_body_in_both_forms(code: Code) -> None:
    error = GatewayError(code, "because")
    assert error.status == FORMS[code][0]
    openai = orjson.loads(errors.body(error, Api.CHAT))
    assert (openai["error"]["message"], openai["error"]["code"], openai["error"]["param"]) == ("because", code, None)
    anthropic = orjson.loads(errors.body(error, Api.MESSAGES, "req-1"))
    assert (anthropic["type"], anthropic["error"]["message"], anthropic["request_id"]) == ("error", "because", "req-1")


def test_events_have_the_grammar_of_their_stream() -> None:
    error = GatewayError(Code.UPSTREAM, "broke")
    assert errors.event(error, Api.CHAT).startswith(b'data: {"error":{"message":"broke"')
    assert errors.event(error, Api.MESSAGES).startswith(b'event: error\ndata: {"type":"error","error":{')
    responses = errors.event(error, Api.RESPONSES, sequence=7)
    name, data = responses.split(b"\n", 1)
    assert name == b"event: error"
    assert orjson.loads(data[6:]) == {
        "type": "error", "code": "upstream", "message": "broke", "param": None, "sequence_number": 7,
    }  # fmt: skip
    for api in Api:
        assert errors.event(error, api).endswith(b"\n\n")


def test_retry_after_is_honest_and_spread() -> None:
    rng = random.Random(1)
    values = {dict(errors.headers(GatewayError(Code.QUEUE_FULL, "", 100.0), rng))[b"retry-after"] for _ in range(50)}
    assert len(values) > 5
    assert all(100 <= int(v) <= 126 for v in values)
    assert dict(errors.headers(GatewayError(Code.QUEUE_FULL, "", 0.01), rng))[b"retry-after"] == b"1"
    assert b"retry-after" not in dict(errors.headers(GatewayError(Code.QUEUE_FULL, ""), rng))


def test_clients_are_told_when_a_retry_cannot_succeed() -> None:
    rng = random.Random(1)
    assert dict(errors.headers(errors.shed("infeasible", None), rng))[b"x-should-retry"] == b"false"
    assert dict(errors.headers(errors.shed("expired", None), rng))[b"x-should-retry"] == b"false"
    for reason in ("infeasible", "queue_full"):  # there will be room: then, and not before
        told = dict(errors.headers(errors.shed(reason, 3.0), rng))
        assert b"x-should-retry" not in told
        assert told[b"retry-after"] in (b"3", b"4")


def test_what_no_idle_replica_could_do_is_not_said_to_be_impossible_only_now() -> None:
    told = errors.shed("infeasible", None, {"first token": 0.05})
    assert told.message == (
        "not even an idle replica could meet the objectives of this request: first token within 50 ms"
    )
    known = errors.shed("infeasible", None, {"first token": 0.05}, predicted_ttft_s=0.3456)
    assert known.message == f"{told.message}; predicted in 346 ms"
    later = errors.shed("infeasible", 3.0, {"first token": 0.05, "end": 2.0})
    assert later.message == (
        "no replica can meet the objectives of this request now: first token within 50 ms, end within 2000 ms"
    )


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("infeasible", 429),
        ("queue_full", 429),
        ("over_quota", 429),
        ("no_replica", 503),
        ("draining", 503),
        ("expired", 504),
        ("something new", 500),
    ],
)
def test_reasons_of_the_core(reason: str, status: int) -> None:
    assert errors.shed(reason, None).status == status
