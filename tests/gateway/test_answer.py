"""What whole answers say, short ones read whole and long ones by their two ends."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answer import TAIL_BYTES, Long, read
from gateway.errors import Api
from policies.model import Usage
from tests.gateway.scripted import Connection, Gateway, Seen, gateway, replica
from tests.gateway.test_failures import whole

USAGE = {"prompt_tokens": 17, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 16}}
IMITATION = 'she wrote "usage":{"prompt_tokens":1,"completion_tokens":1} and "id":"resp_x"'


def completion(text: str, **more: object) -> bytes:
    return orjson.dumps({"id": "c", "choices": [{"text": text, "finish_reason": "stop"}], "usage": USAGE, **more})


def long(api: Api, body: bytes, step: int, collected: int = 1000) -> Long:
    made = Long(api, body[:collected])
    for at in range(collected, len(body), step):
        made.add(body[at : at + step])
    return made


@pytest.mark.parametrize("step", [1, 7, 65536])
def test_usage_of_a_long_answer_stands_near_its_end(step: int) -> None:
    body = completion(IMITATION * 300, prompt_logprobs=None, kv_transfer_params=None)
    assert long(Api.COMPLETIONS, body, step).usage() == Usage(17, 9, 16)


def test_no_text_can_imitate_it() -> None:
    body = orjson.dumps({"id": "c", "choices": [{"text": IMITATION * 300}]})
    assert long(Api.COMPLETIONS, body, 4096).usage() is None


def test_what_is_cut_or_too_far_from_the_end_is_unknown() -> None:
    body = completion("x" * 9000)
    assert long(Api.COMPLETIONS, body[:-20], 4096).usage() is None
    assert long(Api.COMPLETIONS, completion("x", prompt_token_ids=[1] * TAIL_BYTES), 4096).usage() is None
    assert Long(Api.OTHER, completion("x")).usage() is None  # embeddings generate nothing


def test_the_id_of_a_long_response_stands_first() -> None:
    body = orjson.dumps({"id": "resp_1", "output": ["x" * 9000], "usage": {"input_tokens": 3, "output_tokens": 5}})
    made = long(Api.RESPONSES, body, 4096)
    assert (made.response_id, made.usage()) == ("resp_1", Usage(3, 5, None))
    assert long(Api.RESPONSES, b'{"object":"response",' + body[1:], 4096).response_id == ""
    assert long(Api.CHAT, body, 4096).response_id == ""


@given(st.text(max_size=200), st.integers(1, 50))
def test_any_text_before_it_changes_nothing(text: str, step: int) -> None:
    body = completion(text)
    assert long(Api.COMPLETIONS, body, step, collected=10).usage() == read(Api.COMPLETIONS, body).usage


async def test_a_long_answer_is_recorded_with_its_true_tokens() -> None:
    """Beyond 256 KiB, as with log probabilities; and a response of that length can be asked for again."""
    bodies = {
        "/v1/completions": completion("x" * 400_000),
        "/v1/responses": orjson.dumps(
            {"id": "resp_1", "output": "x" * 400_000, "usage": {"input_tokens": 17, "output_tokens": 9}}
        ),
    }

    async def script(connection: Connection, request: Seen) -> None:
        await connection.send(whole(b"200 OK", bodies[request.line.split()[1].decode()]))

    async def recorded(g: Gateway, path: str, number: int) -> tuple[object, ...]:
        answer = await g.post(path, b'{"model":"tiny","prompt":"x","input":"x"}')
        assert answer.body == bodies[path]
        record = await g.record(number)
        return record.outcome, record.prompt.count, record.completion.count, record.completion.source

    async with replica(script) as a, gateway(a) as g:
        assert await recorded(g, "/v1/completions", 1) == ("success", 17, 9, "usage")
        assert await recorded(g, "/v1/responses", 2) == ("success", 17, 9, "usage")
        assert g.proxy.maker("resp_1") == "r0"
