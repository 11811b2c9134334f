"""Bodies of megabytes: text and token ids are read, what only costs time is refused unparsed."""

from __future__ import annotations

import gc

import orjson
import pytest

from gateway import large_json
from gateway.errors import GatewayError
from tests.gateway.scripted import gateway, playing, replica
from tests.gateway.test_failures import GOOD_WHOLE

MANY = large_json.MOST_VALUES + 2


@pytest.mark.parametrize(
    "prompt",
    [
        "1,2," * MANY,  # commas of a table
        '\\",\\' * MANY,  # quotes and backslashes beside them
        list(range(1_000_000)),
    ],
    ids=["commas in text", "quotes in text", "token ids"],
)
def test_a_long_prompt_is_read_as_it_is(prompt: object) -> None:
    body = orjson.dumps({"model": "m", "prompt": prompt})
    assert large_json.loads(body)["prompt"] == prompt


@pytest.mark.parametrize("value", [b"[1]", b"1", b'{"a":1}', b'""'], ids=["lists", "numbers", "objects", "strings"])
def test_more_values_than_any_prompt_has_are_refused(value: bytes) -> None:
    body = b'{"prompt":[' + b",".join([value] * MANY) + b"]}"
    with pytest.raises(
        GatewayError, match="holds too many values: at most 2097152, of which 524288 strings"
    ) as refused:
        large_json.loads(body)
    assert refused.value.status == 400


def test_garbage_is_collected_again_afterwards_also_when_it_was_no_json() -> None:
    assert gc.isenabled()
    large_json.loads(b"[1]")
    assert gc.isenabled()
    with pytest.raises(orjson.JSONDecodeError):
        large_json.loads(b"[")
    assert gc.isenabled()


async def test_it_is_refused_in_the_form_of_the_api_and_no_replica_hears_of_it() -> None:
    body = b'{"model":"tiny","prompt":[' + b"[1]," * MANY + b"1]}"
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        answer = await g.post("/v1/completions", body)
        assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (400, "malformed")
        assert a.seen == []
