"""Replicas, or what stands in their place, that answer what no server should."""

from __future__ import annotations

import pytest

from gateway import usage
from policies.model import Usage
from tests.gateway.scripted import CHAT, gateway, playing, replica
from tests.gateway.test_failures import GOOD_STREAM

ODD = b'data: {"choices":[5,null,[],{"delta":5}]}\n\n'


@pytest.mark.parametrize("status", [b"999", b"600", b"099", b"000"])
async def test_a_status_that_does_not_exist_is_a_broken_answer(status: bytes) -> None:
    odd = [b"HTTP/1.1 " + status + b" Odd\r\ncontent-length: 2\r\n\r\n{}"]
    async with replica(playing(odd)) as a, gateway(a) as g:
        answer = await g.post("/v1/chat/completions", CHAT)
        assert answer.status == 502
        assert (await g.record()).reason == "protocol"
        assert g.in_flight == 0


async def test_any_number_of_interim_heads_may_come_before_the_answer() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    async with replica(playing([interim * 3000 + b"".join(GOOD_STREAM)])) as a, gateway(a) as g:
        answer = await g.post("/v1/chat/completions", CHAT)
        assert (answer.status, answer.body.endswith(b"data: [DONE]\n\n")) == (200, True)


async def test_choices_that_are_no_objects_pass_as_they_came() -> None:
    head, *rest = GOOD_STREAM
    odd = b"%x\r\n%b\r\n" % (len(ODD), ODD)
    async with replica(playing([head, odd, *rest])) as a, gateway(a) as g:
        answer = await g.post("/v1/chat/completions", CHAT)
        assert (answer.status, answer.body.startswith(ODD)) == (200, True)


def test_counts_that_no_request_can_have_are_not_learnt() -> None:
    told = {"prompt_tokens": -7, "completion_tokens": 2**64 - 1, "prompt_tokens_details": {"cached_tokens": True}}
    assert usage.read(told) == Usage(None, None, None)
