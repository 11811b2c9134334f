"""Replicas, or what stands in their place, that answer what no server should."""

from __future__ import annotations

import orjson
import pytest

from gateway import usage
from gateway.config import Config
from gateway.fleet import Fleet
from gateway.replica import MOST_LEVELS, Replica
from gateway.vllm_metrics import read
from policies.model import Usage
from tests.gateway.scripted import CHAT, gateway, playing, replica
from tests.gateway.test_failures import DONE, GOOD_STREAM, STREAM_HEAD

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


@pytest.mark.parametrize("reason", [b"5", b"true", b'["stop"]', b'{"a":1}', b"1e300", b"[" * 900 + b"]" * 900])
async def test_a_finish_reason_that_is_no_text_ends_an_answer_like_any(reason: bytes) -> None:
    said = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":%b}]}\n\n' % reason
    async with replica(playing([STREAM_HEAD, b"%x\r\n%b\r\n" % (len(said), said), DONE])) as a, gateway(a) as g:
        answer = await g.post("/v1/chat/completions", CHAT)
        assert (answer.status, answer.body) == (200, said + b"data: [DONE]\n\n")
        assert (await g.record()).outcome == "success"


@pytest.mark.parametrize("reason", [b"[]", b'{"a":1}', b"5", b'["abort"]'])
async def test_a_reason_that_is_no_text_is_no_reason_to_try_again(reason: bytes) -> None:
    body = b'{"id":"r","status":"incomplete","incomplete_details":{"reason":%b}}' % reason
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    async with replica(playing([whole])) as a, gateway(a) as g:
        answer = await g.post("/v1/responses", b'{"model":"tiny","input":"x"}')
        assert (answer.status, answer.body, len(a.seen)) == (200, body, 1)
        assert (await g.record()).outcome == "success"


# -- what replicas say of themselves -----------------------------------------------------------------------------------

NINES = "9" * 5000
ODD_PAGES = {
    "numbers of thousands of digits": f'vllm:cache_config_info{{block_size="{NINES}",num_gpu_blocks="{NINES}"}} 1\n',
    "sums beyond a float": 'vllm:num_requests_running{engine="0"} 1e308\nvllm:num_requests_running{engine="1"} 1e308\n',
    "less than nothing": "vllm:num_requests_running -5\nvllm:kv_cache_usage_perc -1\n",
    "no numbers": "vllm:num_requests_running NaN\nvllm:kv_cache_usage_perc Inf\nvllm:num_requests_waiting x\n",
    "an adapter's room": f'vllm:lora_requests_info{{max_lora="{NINES}"}} 1\n',
}


@pytest.mark.parametrize("page", ODD_PAGES)
def test_values_that_nothing_can_have_are_unknown(page: str) -> None:
    values = read(ODD_PAGES[page], "r0", 1.0)
    assert (values.running, values.waiting, values.kv_usage) == (None, None, None)
    assert (values.num_gpu_blocks, values.block_size, values.max_adapters) == (None, None, None)


def test_a_model_described_deeper_than_json_is_written_is_listed_without_its_description() -> None:
    def nested(levels: int) -> object:
        return [nested(levels - 1)] if levels else 1

    rows = [{"id": "deep", "x": nested(MOST_LEVELS)}, {"id": "flat", "x": nested(MOST_LEVELS - 1)}]
    fleet = Fleet(Config().health, lambda _: None)
    fleet.add(Replica("r0", "http://127.0.0.1:1"))
    fleet.learn("r0", rows)  # type: ignore[arg-type]
    listed = orjson.loads(fleet.models_document())["data"]
    assert listed == [{"id": "deep", "object": "model", "owned_by": "vllm"}, rows[1]]
