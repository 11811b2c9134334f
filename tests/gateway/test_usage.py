"""Usage is asked for by a splice into the received bytes, and read in each API's spelling."""

from __future__ import annotations

import gc
import sys

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import usage
from policies.model import Usage


def asked(body: bytes) -> bytes | None:
    document = orjson.loads(body)
    parts = usage.ask(body, document.get("stream_options"), "stream_options" in document)
    return None if parts is None else b"".join(parts)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a":1}', b'{"stream_options":{"include_usage":true},"a":1}'),
        (b' {"a": 1.0e2, "a": 2}', b' {"stream_options":{"include_usage":true},"a": 1.0e2, "a": 2}'),
        (b'{"stream_options":{}}', b'{"stream_options":{"include_usage":true}}'),
        (b'{"stream_options": null}', b'{"stream_options": {"include_usage":true}}'),
        (b'{"stream_options":{"x":[1,{"y":2}]}}', b'{"stream_options":{"include_usage":true,"x":[1,{"y":2}]}}'),
        (b'{"stream_options":{"include_usage": false , "x":1}}', b'{"stream_options":{"include_usage": true , "x":1}}'),
        (b'{"stream_options":{"include_usage":true}}', None),
        (b'{"stream_options":"yes"}', None),
        # the word as a value, inside a string, and deeper
        (
            b'{"user":"stream_options","m":[{"stream_options":1}],"t":"\\"stream_options\\":{","stream_options":{}}',
            b'{"user":"stream_options","m":[{"stream_options":1}],"t":"\\"stream_options\\":{",'
            b'"stream_options":{"include_usage":true}}',
        ),
        (
            b'{"stream_options":{"a":1},"m":{"stream_options":{}},"user":"stream_options"}',
            b'{"stream_options":{"include_usage":true,"a":1},"m":{"stream_options":{}},"user":"stream_options"}',
        ),
        # what is not found goes as it came: a name in escapes, or only in other places
        (b'{"stream\\u005foptions":{"a":1}}', None),
        (b'{"stream\\u005foptions":{"a":1},"m":{"stream_options":{"a":1}}}', None),
        # the last of two counts, as in the engine's parser
        (
            b'{"stream_options":{"include_usage":true},"stream_options":{}}',
            b'{"stream_options":{"include_usage":true},"stream_options":{"include_usage":true}}',
        ),
    ],
)
def test_splice(body: bytes, expected: bytes | None) -> None:
    assert asked(body) == expected


def test_a_body_is_searched_and_not_walked() -> None:
    """Walking the text of a body token by token took a minute of the loop that all streams share."""
    few = {"stream_options": {}, "prompt": [[1], [2]]}
    many = {"stream_options": {}, "prompt": [[1]] * 10_000}
    assert _steps(orjson.dumps(few)) == _steps(orjson.dumps(many)) > 0


def test_options_longer_than_the_bound_stay_as_they_are() -> None:
    assert asked(orjson.dumps({"stream_options": {"a": [1] * usage.MOST_BYTES}})) is None


def _steps(body: bytes) -> int:
    """Calls made to ask for usage."""
    options = orjson.loads(body)["stream_options"]
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # what listens to the collector would be counted too
    sys.setprofile(count)
    try:
        usage.ask(body, options, True)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


TEXT = st.text(alphabet='a"\\{}[]:, é', max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["a", "model", "include_usage", "}", '"stream_options":']), VALUES, max_size=5),
    st.none() | st.dictionaries(st.sampled_from(["include_usage", "x", "continuous_usage_stats"]), VALUES, max_size=3),
    st.booleans(),
)
def test_only_the_asking_changes(fields: dict[str, object], options: object, pretty: bool) -> None:
    document = {**fields, "stream_options": options, "z": 1}
    body = orjson.dumps(document, option=orjson.OPT_INDENT_2 if pretty else 0)
    spliced = asked(body)
    wanted = {**document, "stream_options": {**(options or {}), "include_usage": True}}  # type: ignore[dict-item]
    assert orjson.loads(body if spliced is None else spliced) == wanted


def test_a_large_body_is_not_copied() -> None:
    body = b'{"prompt":"' + b"x" * 100_000 + b'"}'
    parts = usage.ask(body, None, False)
    assert parts is not None
    assert [type(part) for part in parts] == [memoryview, bytes, memoryview]
    assert b"".join(parts) == b'{"stream_options":{"include_usage":true},' + body[1:]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"prompt_tokens": 17, "completion_tokens": 4}, Usage(17, 4, None)),
        ({"prompt_tokens": 17, "completion_tokens": 4, "prompt_tokens_details": None}, Usage(17, 4, None)),
        ({"prompt_tokens": 17, "prompt_tokens_details": {"cached_tokens": 16}}, Usage(17, None, 16)),
        ({"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 8}}, Usage(9, 2, 8)),
        ({"input_tokens": 9, "output_tokens": 2, "cache_read_input_tokens": 4}, Usage(9, 2, 4)),
        (None, None),
        ([], None),
    ],
)
def test_every_spelling_is_read(told: object, expected: Usage | None) -> None:
    assert usage.read(told) == expected


def test_anthropic_splits_usage_over_two_events() -> None:
    assert usage.merge(Usage(17, 0, None), Usage(None, 3, 8)) == Usage(17, 3, 8)
    assert usage.merge(None, Usage(1)) == Usage(1)
    assert usage.merge(Usage(1), None) == Usage(1)
