"""Traps of reading an answer, each as literal bytes at literal times."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from loadtests.answer import Answer
from policies.objectives import Partition

CAPTURES = Path(__file__).resolve().parent.parent / "captures"


def chat(**delta: object) -> bytes:
    return choice(delta, None)


def choice(delta: dict[str, object], finish: str | None, index: int = 0) -> bytes:
    import json

    body = {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


ROLE = chat(role="assistant", content="")
USAGE_3 = (
    b'data: {"choices":[],"usage":{"prompt_tokens":17,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def read(*events: bytes, status: int = 200, ended: bool = True, **settings: object) -> Answer:
    """Feeds event i at i seconds after 10."""
    answer = Answer(**settings)  # type: ignore[arg-type]
    answer.status = status
    for i, event in enumerate(events):
        answer.feed(event, 10.0 + i)
    if ended:
        answer.end(10.0 + len(events))
    return answer


def test_a_whole_stream_is_complete_and_timed_from_its_content() -> None:
    answer = read(ROLE, chat(content="wo"), chat(content="arket"), choice({"content": " s"}, "length"), USAGE_3, DONE)
    assert answer.fault() is None
    assert (answer.first_content_at, answer.last_content_at, answer.ended_at) == (11.0, 13.0, 16.0)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (17, 3, 16)
    assert answer.longest_gap_s == 1.0


def test_a_role_only_first_chunk_is_no_token() -> None:
    assert read(ROLE, ended=False).first_content_at is None


def test_comments_are_no_tokens_and_do_not_reset_the_gap() -> None:
    answer = read(chat(content="a"), b": keep-alive\n\n", b": keep-alive\n\n", chat(content="b"))
    assert answer.content_events == 2
    assert answer.longest_gap_s == 3.0


def test_usage_in_a_last_chunk_without_choices_is_read_and_is_no_content() -> None:
    answer = read(chat(content="a"), USAGE_3)
    assert (answer.completion_tokens, answer.last_content_at) == (3, 10.0)


def test_several_events_in_one_read_share_its_time() -> None:
    answer = read(ROLE + chat(content="a") + chat(content="b"))
    assert (answer.content_events, answer.first_content_at, answer.longest_gap_s) == (2, 10.0, 0.0)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_an_event_over_two_reads_has_the_time_of_the_second(cut: int) -> None:
    event = chat(content="hello")
    answer = read(event[:cut], event[cut:])
    assert (answer.content_events, answer.first_content_at) == (1, 11.0)


def test_carriage_returns_split_over_reads_still_end_an_event() -> None:
    event = chat(content="hello").replace(b"\n\n", b"\r\n\r\n")
    answer = read(event[:-3], event[-3:-2], event[-2:])
    assert answer.content_events == 1


def test_one_token_is_complete_and_has_no_pace() -> None:
    one = USAGE_3.replace(b'"completion_tokens":3', b'"completion_tokens":1')
    answer = read(choice({"content": "a"}, "length"), one, DONE)
    assert answer.fault() is None
    assert answer.first_content_at == answer.last_content_at == 10.0


def test_zero_tokens_are_a_failure_however_clean_the_end() -> None:
    none = USAGE_3.replace(b'"completion_tokens":3', b'"completion_tokens":0')
    assert read(choice({"content": ""}, "stop"), none, DONE).fault() == (Partition.TRUNCATED, "zero_tokens")


def test_missing_usage_is_a_failure_for_the_driver() -> None:
    assert read(choice({"content": "a"}, "stop"), DONE).fault() == (Partition.TRUNCATED, "no_usage")


def test_an_error_after_the_first_token_is_truncated_even_with_done_behind_it() -> None:
    error = b'data: {"error": {"message": "boom", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
    answer = read(chat(content="a"), error, DONE)
    assert answer.fault() == (Partition.TRUNCATED, "in_band_error: InternalServerError")


def test_a_queue_limit_that_comes_as_the_first_event_of_a_200_is_a_rejection() -> None:
    error = b'data: {"error": {"message": "busy", "type": "Service Unavailable", "param": null, "code": 503}}\n\n'
    assert read(error, DONE).fault() == (Partition.REJECTED, "in_band_503")


def test_a_stream_without_done_is_truncated() -> None:
    answer = read(choice({"content": "a"}, "length"), USAGE_3)
    assert answer.fault() == (Partition.TRUNCATED, "no_terminal_event")


def test_a_connection_cut_is_truncated() -> None:
    assert read(chat(content="a"), ended=False).fault() == (Partition.TRUNCATED, "connection_cut")


def test_finish_reason_null_at_the_end_is_truncated() -> None:
    assert read(chat(content="a"), USAGE_3, DONE).fault() == (Partition.TRUNCATED, "no_finish_reason")


def test_one_of_two_choices_without_finish_reason_is_truncated() -> None:
    answer = read(choice({"content": "a"}, "stop", 0), choice({"content": "b"}, None, 1), USAGE_3, DONE)
    assert answer.fault() == (Partition.TRUNCATED, "no_finish_reason")


def test_abort_with_a_clean_end_is_no_success() -> None:
    """What vLLM sends on SIGTERM: 200, finish_reason abort, [DONE]."""
    answer = read(choice({"content": "a"}, "abort"), USAGE_3, DONE)
    assert answer.fault() == (Partition.TRUNCATED, "finish_abort")


def test_forced_length_not_reached_is_truncated() -> None:
    answer = read(choice({"content": "a"}, "stop"), USAGE_3, DONE, forced_tokens=5)
    assert answer.fault() == (Partition.TRUNCATED, "length_3_of_5")


def test_a_stall_in_the_middle_shows_in_the_longest_gap() -> None:
    answer = Answer(status=200)
    for at in (0.0, 0.1, 0.2, 4.2, 4.3):
        answer.feed(chat(content="x"), at)
    assert answer.longest_gap_s == pytest.approx(4.0)


@pytest.mark.parametrize("delta", [
    {"reasoning_content": "hm"}, {"reasoning": "hm"}, {"refusal": "no"}, {"tool_calls": [{"index": 0}]},
    {"audio": {"data": "AA"}},
])  # fmt: skip
def test_reasoning_refusal_tools_and_audio_are_content(delta: dict[str, object]) -> None:
    assert read(chat(**delta)).content_events == 1


@pytest.mark.parametrize(("status", "partition"), [
    (429, Partition.REJECTED), (503, Partition.REJECTED), (400, Partition.ERROR_HTTP),
    (500, Partition.ERROR_HTTP), (404, Partition.ERROR_HTTP),
])  # fmt: skip
def test_refusals_by_status(status: int, partition: Partition) -> None:
    answer = read(b'{"error":{"message":"m","type":"t","code":"infeasible"}}', status=status)
    assert answer.fault() == (partition, "infeasible")


@pytest.mark.parametrize("event", [
    b'data: {"error":{"message":"m","type":"timeout_error","param":null,"code":"expired"}}\n\n',
    b'event: error\ndata: {"type":"error","code":"expired","message":"m","param":null,"sequence_number":9}\n\n',
    b'event: error\ndata: {"type":"error","error":{"type":"timeout_error","message":"m","code":"expired"}}\n\n',
])  # fmt: skip
def test_a_deadline_that_passed_after_commit_is_late_in_each_api(event: bytes) -> None:
    assert read(chat(content="a"), event).fault() == (Partition.SLOW_E2E, "expired")


def test_no_response_at_all_is_a_transport_error() -> None:
    assert Answer().fault() == (Partition.ERROR_TRANSPORT, "no_response")


def recorded(name: str) -> list[tuple[str, float, bytes]]:
    """(path, seconds, body bytes) of every read of a capture, HTTP framing taken off."""
    reads: list[tuple[str, float, bytes]] = []
    path = ""
    for line in (CAPTURES / name).read_text().splitlines():
        if line.startswith(">>> POST "):
            path = line.split()[2]
        elif match := re.match(r"\+ *([0-9.]+)ms (b['\"].*)", line):
            data = ast.literal_eval(match[2])
            if data.startswith(b"HTTP/1.1"):
                data = data.partition(b"\r\n\r\n")[2]
            reads.append((path, float(match[1]) / 1000, re.sub(rb"(?:^|\r\n)[0-9a-f]+\r\n", b"", data)))
    return reads


@pytest.mark.parametrize(("name", "path", "tokens"), [
    ("sse-chat-usage.txt", "/v1/chat/completions", 4),
    ("sse-chat-continuous-usage.txt", "/v1/chat/completions", None),
    ("sse-completions-usage.txt", "/v1/completions", None),
    ("sse-responses-messages-n.txt", "/v1/responses", 3),
    ("sse-responses-messages-n.txt", "/v1/messages", 3),
])  # fmt: skip
def test_recorded_streams_of_vllm_are_complete(name: str, path: str, tokens: int | None) -> None:
    answer = Answer(status=200)
    for where, at, data in recorded(name):
        if where == path:
            answer.feed(data, at)
    answer.end(99.0)
    assert answer.fault() is None
    assert answer.content_events >= 1
    assert tokens is None or answer.completion_tokens == tokens


def test_the_recorded_answer_that_is_not_streamed_is_complete() -> None:
    answer = Answer(status=200, streamed=False, forced_tokens=3)
    body = recorded("chat-nonstream.txt")[0][2]
    answer.feed(body[:100], 1.0)
    answer.feed(body[100:], 2.0)
    answer.end(2.0)
    assert answer.fault() is None
    assert (answer.completion_tokens, answer.first_byte_at, answer.ended_at) == (3, 1.0, 2.0)
