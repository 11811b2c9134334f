"""What is read from a request, and that nothing of it is changed."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.endpoints import ALLOW, RESPONSE
from gateway.errors import GatewayError
from gateway.openai import Call, Tighter, parse

CHAT, COMPLETIONS = ALLOW["/v1/chat/completions"], ALLOW["/v1/completions"]


def read(ask: bool = True, path: str = "/v1/chat/completions", **fields: Any) -> Call:
    return parse(ALLOW[path], {}, orjson.dumps(fields), ask_usage=ask)


def sent(call: Call) -> bytes:
    return b"".join(bytes(part) for part in call.parts)


def refused(headers: dict[bytes, bytes], body: bytes) -> tuple[str, str | None]:
    with pytest.raises(GatewayError) as caught:
        parse(CHAT, headers, body, ask_usage=True)
    assert caught.value.code == "malformed"
    return caught.value.message, caught.value.param


def test_a_stream_is_asked_for_usage_and_only_for_that() -> None:
    call = read(model="m", stream=True)
    assert sent(call) == b'{"stream_options":{"include_usage":true},"model":"m","stream":true}'
    assert (call.body, call.withholds_usage) == (b'{"model":"m","stream":true}', True)
    assert call.length == len(sent(call))


def test_who_asked_for_usage_gets_it() -> None:
    call = read(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert sent(call) == call.body
    assert (call.withholds_usage, call.wants_running_usage) == (False, True)


@pytest.mark.parametrize(
    ("path", "fields", "ask"),
    [
        ("/v1/chat/completions", {"stream": False}, True),
        ("/v1/chat/completions", {"stream": "yes"}, True),  # the replica refuses it with the true message
        ("/v1/chat/completions", {"stream": True}, False),
        ("/v1/chat/completions", {"stream": True, "n": 2}, True),
        ("/v1/completions", {"stream": True, "prompt": ["a", "b"]}, True),
        ("/v1/responses", {"stream": True}, True),  # it reports usage by itself
        ("/v1/messages", {"stream": True}, True),
        ("/v1/embeddings", {"stream": True}, True),
    ],
)
def test_everything_else_goes_as_it_came(path: str, fields: dict[str, Any], ask: bool) -> None:
    call = read(ask, path, **fields)
    assert (sent(call), call.withholds_usage) == (call.body, False)


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": 0}, 1),
        ({"n": True}, 1),
        ({"prompt": "one"}, 1),
        ({"prompt": ["one", "two"]}, 2),
        ({"prompt": [1, 2, 3]}, 1),  # token ids of one prompt
        ({"prompt": [[1, 2], [3]], "n": 2}, 4),
        ({"prompt": []}, 1),
        ({"n": 2**64 - 1}, 2**24),
    ],
)
def test_how_many_answers_a_call_makes(fields: dict[str, Any], answers: int) -> None:
    assert read(path="/v1/completions", **fields).answers == answers


def test_length_by_each_name_the_newest_first() -> None:
    assert read(max_tokens=5).max_tokens == 5
    assert read(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert read(path="/v1/responses", max_output_tokens=9).max_tokens == 9
    assert read(max_tokens=0).max_tokens is None
    assert read(max_tokens=True).max_tokens is None
    assert read(max_tokens="5").max_tokens is None


def test_what_a_client_asks_for_at_most_still_fits_into_a_journal_and_a_message() -> None:
    call = read(n=2**64 - 1, max_tokens=2**64 - 1)
    assert call.max_tokens == 2**32
    assert orjson.loads(orjson.dumps(call.max_tokens * call.answers)) == 2**56


def test_the_session_of_the_header_goes_before_those_of_the_body() -> None:
    assert read(session_id="s", prompt_cache_key="k").session == "s"
    assert read(prompt_cache_key="k").session == "k"
    assert read(session_id="").session is None
    call = parse(CHAT, {b"x-session-id": b"h" * 300}, b'{"session_id":"s"}', ask_usage=True)
    assert call.session == "h" * 256


def test_an_earlier_response_is_named_or_not() -> None:
    assert read(path="/v1/responses", previous_response_id="resp_1").previous_response == "resp_1"
    assert read(path="/v1/responses", previous_response_id=None).previous_response is None


def test_headers_in_milliseconds_become_seconds() -> None:
    headers = {b"x-slo-ttft-ms": b"500", b"x-slo-tpot-ms": b"12.5", b"x-deadline-ms": b"1e4"}
    assert parse(CHAT, headers, b"{}", ask_usage=True).tighter == Tighter(0.5, 0.0125, 10.0)


@pytest.mark.parametrize("value", [b"0", b"-1", b"soon", b"nan", b"inf", b"1e12", b""])
def test_a_time_that_is_none_is_named(value: bytes) -> None:
    message, param = refused({b"x-deadline-ms": value}, b"{}")
    assert param == "x-deadline-ms"
    assert message == f"x-deadline-ms: {value.decode()!r} must be a positive number of milliseconds"


def test_a_body_that_is_no_object_is_named() -> None:
    assert refused({}, b"[1]") == ("the request body must be a JSON object", None)
    assert refused({}, b"{")[0].startswith("the request body is not valid JSON: ")
    assert refused({}, b'{"model":7}') == ("model must be text, not int", "model")


def test_a_form_tells_its_model_and_nothing_else_is_read() -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n'
    endpoint = ALLOW["/v1/audio/transcriptions"]
    call = parse(endpoint, {b"content-type": b"multipart/form-data; boundary=b"}, body, ask_usage=True)
    assert (call.model, call.document, sent(call)) == ("whisper", None, body)
    assert parse(endpoint, {b"content-type": b"audio/wav"}, body, ask_usage=True).model == ""


def test_calls_about_state_need_no_body() -> None:
    assert parse(RESPONSE, {}, b"", ask_usage=True).parts == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["model", "n", "prompt", "stream_options", "session_id", "max_tokens"]), JSON))
def test_whatever_is_sent_the_replica_sees_it_and_perhaps_one_field_more(fields: dict[str, Any]) -> None:
    fields["stream"] = True
    fields.pop("model", None)
    body = orjson.dumps(fields)
    call = parse(COMPLETIONS, {}, body, ask_usage=True)
    seen = orjson.loads(sent(call))
    options = seen.get("stream_options")
    if sent(call) != body and isinstance(options, dict):
        assert options.pop("include_usage") is True
        asked = fields.get("stream_options") or {}
        asked.pop("include_usage", None)
        assert options == asked
        seen.pop("stream_options")
        fields.pop("stream_options", None)
    assert seen == fields
