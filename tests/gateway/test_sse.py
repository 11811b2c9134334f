"""What counts as content, per API, and what the template of a stream may and may not match."""

from __future__ import annotations

import orjson
import pytest

from gateway.errors import Api
from gateway.sse import ABORT, COMMENT, CONTENT, ERROR, FINISH, MAX_EVENT_BYTES, TERMINAL, USAGE, EventScanner


def event(data: object, name: str = "") -> bytes:
    line = b"data: " + (data if isinstance(data, bytes) else orjson.dumps(data)) + b"\n\n"
    return (f"event: {name}\n".encode() if name else b"") + line


def chat(delta: dict[str, object], finish: str | None = None) -> bytes:
    return event({"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


CASES = [
    (Api.CHAT, chat({"role": "assistant", "content": ""}), 0),
    (Api.CHAT, chat({"content": "a"}), CONTENT),
    (Api.CHAT, chat({"content": ""}), 0),
    (Api.CHAT, chat({}), 0),
    (Api.CHAT, chat({"reasoning": "hm"}), CONTENT),
    (Api.CHAT, chat({"reasoning_content": "hm"}), CONTENT),
    (Api.CHAT, chat({"refusal": "no"}), CONTENT),
    (Api.CHAT, chat({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}), CONTENT),
    (Api.CHAT, chat({"audio": {"data": "AAAA"}}), CONTENT),
    (Api.CHAT, chat({"content": "a"}, "length"), CONTENT | FINISH),
    (Api.CHAT, chat({}, "stop"), FINISH),
    (Api.CHAT, chat({"content": ""}, "abort"), FINISH | ABORT),
    (Api.CHAT, event({"choices": [], "usage": {"prompt_tokens": 1}}), USAGE),
    (Api.CHAT, event(b"[DONE]"), TERMINAL),
    (Api.CHAT, b": keep-alive\n\n", COMMENT),
    (Api.CHAT, event({"error": {"message": "x", "code": 500}}), ERROR),
    (Api.COMPLETIONS, event({"choices": [{"text": "a", "finish_reason": None}]}), CONTENT),
    (Api.COMPLETIONS, event({"choices": [{"text": "", "finish_reason": None}]}), 0),
    (Api.RESPONSES, event({"type": "response.created", "response": {"id": "r"}}, "response.created"), 0),
    (Api.RESPONSES, event({"type": "response.output_text.delta", "delta": "a"}, "response.output_text.delta"), CONTENT),
    (Api.RESPONSES, event({"type": "response.reasoning_text.delta", "delta": "a"}), CONTENT),
    (Api.RESPONSES, event({"type": "response.function_call_arguments.delta", "delta": "{"}), CONTENT),
    (Api.RESPONSES, event({"type": "response.output_text.delta", "delta": ""}), 0),
    (Api.RESPONSES, event({"type": "response.output_text.done", "text": "a"}), 0),
    (Api.RESPONSES, event({"type": "response.completed", "response": {}}), TERMINAL | FINISH),
    (Api.RESPONSES, event({"type": "response.failed", "response": {"error": {"message": "x"}}}), TERMINAL | ERROR),
    (Api.RESPONSES, event({"type": "error", "message": "x"}), ERROR),
    (Api.MESSAGES, event({"type": "message_start", "message": {"usage": {"input_tokens": 3}}}, "message_start"), 0),
    (Api.MESSAGES, event({"type": "content_block_start", "content_block": {"type": "text", "text": ""}}), 0),
    (Api.MESSAGES, event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}), CONTENT),
    (
        Api.MESSAGES,
        event({"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "."}}),
        CONTENT,
    ),
    (Api.MESSAGES, event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": ""}}), 0),
    (Api.MESSAGES, event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}), FINISH),
    (Api.MESSAGES, event({"type": "message_stop"}, "message_stop"), TERMINAL),
    (Api.MESSAGES, event({"type": "ping"}, "ping"), 0),
    (Api.MESSAGES, event({"type": "error", "error": {"message": "x"}}, "error"), ERROR),
]


@pytest.mark.parametrize(("api", "data", "kind"), CASES)
def test_class_of_an_event(api: Api, data: bytes, kind: int) -> None:
    assert EventScanner(api).split(data) == [(data, kind)]


def test_after_the_first_content_event_the_usual_one_is_only_compared() -> None:
    scan = EventScanner(Api.CHAT)
    scan.split(chat({"content": "first"}))
    parsed = scan.events
    for text in ("second", ' with "quotes" and \\ and \n', "data: [DONE]", '"finish_reason":"abort"', "é"):
        assert scan.usual(chat({"content": text}))
    assert scan.events == parsed


@pytest.mark.parametrize(
    "other",
    [
        chat({"content": ""}),
        chat({"content": "a"}, "stop"),
        chat({"role": "assistant", "content": "a"}),
        chat({"reasoning": "a"}),
        chat({"content": "a"}) + chat({"content": "b"}),
        chat({"content": "a"}) + event(b"[DONE]"),
        chat({"content": "a"})[:-1],
        event(b"[DONE]"),
        b": keep-alive\n\n",
        event({"error": {"message": "x"}}),
    ],
)
def test_whatever_differs_is_parsed(other: bytes) -> None:
    scan = EventScanner(Api.CHAT)
    scan.split(chat({"content": 'quoted " and \\" and \\\\'}))
    assert not scan.usual(other)


def test_the_template_holds_for_numbered_events_of_responses() -> None:
    scan = EventScanner(Api.RESPONSES)

    def delta(text: str, number: int) -> bytes:
        data = {"delta": text, "sequence_number": number, "type": "response.output_text.delta"}
        return event(data, "response.output_text.delta")

    scan.split(delta("a", 4))
    assert scan.usual(delta("b", 5))
    assert not scan.usual(delta("", 6))
    assert not scan.usual(event({"type": "response.completed", "response": {}}, "response.completed"))


def test_several_events_in_one_read_and_one_over_several() -> None:
    scan = EventScanner(Api.CHAT)
    data = chat({"content": "a"}) + b": c\n\n" + chat({"content": "b"}) + event(b"[DONE]")
    assert [kind for _, kind in scan.split(data)] == [CONTENT, COMMENT, CONTENT, TERMINAL]
    scan = EventScanner(Api.CHAT)
    kinds = [kind for byte in data for _, kind in scan.split(bytes([byte]))]
    assert kinds == [CONTENT, COMMENT, CONTENT, TERMINAL]
    assert scan.carry == b""


def test_servers_that_end_lines_with_crlf_are_understood() -> None:
    scan = EventScanner(Api.CHAT)
    data = (chat({"content": "a"}) + event(b"[DONE]")).replace(b"\n", b"\r\n")
    assert [kind for _, kind in scan.split(data)] == [CONTENT, TERMINAL]


def test_running_usage_that_nobody_asked_for_is_noticed() -> None:
    scan = EventScanner(Api.CHAT)
    body = {"choices": [{"delta": {"content": "a"}}], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}
    assert scan.split(event(body)) == [(event(body), CONTENT)]
    assert scan.forced_usage
    assert scan.usage is not None
    assert scan.usage.completion_tokens == 1


def test_an_event_of_megabytes_is_neither_joined_nor_searched_from_its_start_on_each_read() -> None:
    scan = EventScanner(Api.CHAT)
    long = chat({"content": "x" * 1_000_000})
    reads = [long[at : at + 1000] for at in range(0, len(long), 1000)]
    kinds = []
    for read in reads:
        kinds += [kind for _, kind in scan.split(read)]
        assert len(scan.carry) <= 1000  # the rest waits in pieces
    assert kinds == [CONTENT]
    assert scan.carry == b""


def test_an_end_that_began_in_the_read_before_is_found() -> None:
    data = (chat({"content": "a"}) + event(b"[DONE]")).replace(b"\n", b"\r\n")
    for at in range(1, len(data)):
        scan = EventScanner(Api.CHAT)
        assert [kind for part in (data[:at], data[at:]) for _, kind in scan.split(part)] == [CONTENT, TERMINAL]


def test_an_endless_event_that_comes_in_pieces_is_refused() -> None:
    scan = EventScanner(Api.CHAT)
    piece = b"x" * 65536
    for _ in range(MAX_EVENT_BYTES // len(piece)):
        assert scan.split(piece) == []
    with pytest.raises(ValueError, match="longer than"):
        scan.split(piece)
