"""Every recorded answer of a real vLLM passes through as it was."""

from __future__ import annotations

import re

import pytest

from tests.gateway.scripted import CAPTURES, dechunk, gateway, playing, reads, replica

# capture, section, path
STREAMS = [
    ("sse-chat.txt", 0, "/v1/chat/completions"),
    ("sse-chat-usage.txt", 0, "/v1/chat/completions"),
    ("sse-chat-continuous-usage.txt", 0, "/v1/chat/completions"),
    ("sse-completions.txt", 0, "/v1/completions"),
    ("sse-completions-usage.txt", 0, "/v1/completions"),
    ("sse-completions-return-token-ids.txt", 0, "/v1/completions"),
    ("sse-keepalive-comment.txt", 0, "/v1/completions"),
    ("sse-responses-messages-n.txt", 0, "/v1/responses"),
    ("sse-responses-messages-n.txt", 1, "/v1/messages"),
    ("sse-responses-messages-n.txt", 2, "/v1/completions"),
]
STREAMING = b'{"model":"tiny","prompt":"where is the river","stream":true}'


@pytest.mark.parametrize("spliced", [True, False], ids=["spliced", "asgi"])
@pytest.mark.parametrize(("capture", "section", "path"), STREAMS)
async def test_stream_passes_byte_equal_with_usage_off(capture: str, section: int, path: str, spliced: bool) -> None:
    _, body, chunks = reads(capture, section)
    async with (
        replica(playing(chunks)) as r,
        gateway(r, settings='stream.usage = "off"', spliced=spliced) as g,
    ):
        answer = await g.post(path, body or STREAMING)
        _, _, recorded = b"".join(chunks).partition(b"\r\n\r\n")
        assert answer.status == 200
        assert answer.body == dechunk(recorded)
        assert r.seen[0].body == (body or STREAMING)
        if spliced:
            assert answer.raw == recorded  # the framing too
        record = await g.record()
        assert (record.outcome, record.status) == ("success", 200)
        assert record.content_events >= 2


def normal(body: bytes) -> bytes:
    """Two recordings of one request differ in these three fields only."""
    body = re.sub(rb'"id":"[^"]*"', b'"id":"-"', body)
    body = re.sub(rb'"created":\d+', b'"created":0', body)
    return re.sub(rb'"system_fingerprint":"[^"]*"', b'"system_fingerprint":"-"', body)


@pytest.mark.parametrize("spliced", [True, False], ids=["spliced", "asgi"])
@pytest.mark.parametrize(
    ("plain", "with_usage", "path"),
    [
        ("sse-chat.txt", "sse-chat-usage.txt", "/v1/chat/completions"),
        ("sse-completions.txt", "sse-completions-usage.txt", "/v1/completions"),
    ],
)
async def test_usage_is_asked_for_and_withheld(plain: str, with_usage: str, path: str, spliced: bool) -> None:
    """The client gets what the replica would have sent it: vLLM moves its fingerprint when usage is asked for."""
    _, body, undisturbed = reads(plain)
    _, _, asked = reads(with_usage)
    async with replica(playing(asked)) as r, gateway(r, spliced=spliced) as g:
        answer = await g.post(path, body)
        assert r.seen[0].body == b'{"stream_options":{"include_usage":true},' + body[1:]
        expected = dechunk(b"".join(undisturbed).partition(b"\r\n\r\n")[2])
        assert normal(answer.body) == normal(expected)
        record = await g.record()
        assert (record.prompt.count, record.completion.count) == (17 if "chat" in plain else 6, 4)
        assert record.completion.source == "usage"


@pytest.mark.parametrize(("capture", "section", "path"), STREAMS[1:3] + STREAMS[4:5] + STREAMS[7:])
async def test_stream_passes_byte_equal_where_usage_is_the_clients_own(capture: str, section: int, path: str) -> None:
    _, body, chunks = reads(capture, section)
    async with replica(playing(chunks)) as r, gateway(r) as g:
        answer = await g.post(path, body)
        assert r.seen[0].body == body
        assert answer.raw == b"".join(chunks).partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("usage", ["ask", "off"])
async def test_whole_answer_passes_byte_equal(usage: str) -> None:
    _, body, chunks = reads("chat-nonstream.txt")
    async with replica(playing(chunks)) as r, gateway(r, settings=f'stream.usage = "{usage}"') as g:
        answer = await g.post("/v1/chat/completions", body, "x-request-id: my-req-43\r\n")
        assert r.seen[0].body == body
        assert answer.body == b"".join(chunks).partition(b"\r\n\r\n")[2]
        assert answer.header("x-request-id") == "my-req-43"
        assert answer.header("server") == "uvicorn"
        record = await g.record()
        assert (record.prompt.count, record.completion.count, record.cached.count) == (17, 3, 0)


ERRORS = [
    section
    for section in re.split(r"^### .*\n", (CAPTURES / "errors.txt").read_text(), flags=re.MULTILINE)
    if section.startswith("HTTP/1.1 4")
]


@pytest.mark.parametrize("case", range(len(ERRORS)))
async def test_errors_of_the_replica_pass_with_status_type_and_body(case: int) -> None:
    """Deterministic errors are the client's own: passed through, not repeated, not counted against the replica."""
    head, _, body = ERRORS[case].partition("\n\n")
    body = body.rstrip("\n")
    raw = head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body.encode()
    declared = re.search(r"content-length: (\d+)", head)
    assert declared is not None
    if int(declared[1]) != len(body):
        raw = raw.replace(declared[0].encode(), f"content-length: {len(body)}".encode())
    async with replica(playing([raw])) as a, replica(playing([raw])) as b, gateway(a, b) as g:
        answer = await g.post("/v1/completions", b'{"model":"tiny","prompt":"x"}')
        assert answer.status == int(head[9:12])
        assert answer.body == body.encode()
        assert answer.header("content-type") == "application/json"
        assert len(a.seen) + len(b.seen) == 1
        assert (await g.record()).outcome == "client_error"
        assert [g.fleet.health.records[r].failed_in_row for r in ("r0", "r1")] == [0, 0]
