"""Every recorded answer of a real vLLM passes through as it was."""

from __future__ import annotations

import pytest

from tests.gateway.scripted import dechunk, gateway, playing, reads, replica

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
