"""A row as HTTP: the same bytes for every arm, the prefix at the front, objectives beside."""

from __future__ import annotations

import orjson
import pytest

from loadtests.requests import Shape, ShapeError
from loadtests.schedule import Row, Schedule
from policies.model import ServiceClass

CLASSES = {"interactive": ServiceClass("interactive", ttft_s=2.0, ttft_s_per_token=0.001, tpot_s=0.1)}
FIRST = Row(0, 0.0, 20, 5, (7, 8), session="s")
NEXT = Row(1, None, 30, 5, (7, 8, 9), session="s", turn=1)
SCHEDULE = Schedule((FIRST, NEXT), 1.0, 1.0, 10, CLASSES)


def body(row: Row, **shape: object) -> dict[str, object]:
    parsed: dict[str, object] = orjson.loads(Shape("tiny", **shape).build(SCHEDULE, row).body)  # type: ignore[arg-type]
    return parsed


def test_a_chat_request_forces_its_length_and_asks_for_usage() -> None:
    request = Shape("tiny").build(SCHEDULE, FIRST)
    parsed = orjson.loads(request.body)
    assert request.path == "/v1/chat/completions"
    assert (parsed["max_tokens"], parsed["ignore_eos"], parsed["stream"]) == (5, True, True)
    assert parsed["stream_options"] == {"include_usage": True}
    assert (request.forced_tokens, request.streamed) == (5, True)


def test_the_next_turn_begins_with_the_bytes_of_the_last() -> None:
    def content(row: Row) -> str:
        text: str = body(row)["messages"][0]["content"]  # type: ignore[index]
        return text

    assert content(NEXT).startswith(content(FIRST))
    assert len(content(NEXT).split()) == 30


def test_objectives_are_resolved_for_the_prompt_and_scaled_with_the_replicas() -> None:
    headers = Shape("tiny", time_scale=2.0).build(SCHEDULE, FIRST).headers
    assert (headers["x-slo-ttft-ms"], headers["x-slo-tpot-ms"]) == ("1010.000", "50.000")
    assert "x-deadline-ms" not in headers
    assert (headers["x-request-id"], headers["x-session-id"]) == ("run-0", "run-s")


def test_natural_ends_are_not_forced() -> None:
    request = Shape("tiny", natural=True).build(SCHEDULE, FIRST)
    assert request.forced_tokens is None
    assert "ignore_eos" not in orjson.loads(request.body)


def test_a_salt_parts_one_block_of_runs_from_the_next() -> None:
    assert body(FIRST, salt="b1")["cache_salt"] == "b1"
    assert "cache_salt" not in body(FIRST)


def test_not_streamed_asks_for_nothing_of_a_stream() -> None:
    assert "stream_options" not in body(FIRST, stream=False)


def test_token_ids_need_a_vocabulary() -> None:
    assert len(body(FIRST, endpoint="ids", vocabulary=32_000)["prompt"]) == 20  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="--vocabulary"):
        Shape("tiny", "ids")
    with pytest.raises(ShapeError, match="one of chat, completions, ids"):
        Shape("tiny", "chatt")
