"""The bytes of a stream may arrive cut anywhere; what the client gets and what is measured do not depend on it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import openai
from gateway.endpoints import ALLOW
from gateway.http1 import Head, UpstreamConnection
from gateway.pulses import Meter
from gateway.relay import Relay
from gateway.result import Result
from gateway.upstream import Pool
from policies.model import Usage
from tests.gateway.scripted import dechunk, reads


class Written:
    """A client that remembers."""

    def __init__(self, framed: bool) -> None:
        self.framed, self.paused, self.ended = framed, False, False
        self.sent = b""
        self.payload = b""
        self.raw = self.write_framed

    def write(self, payload: bytes) -> None:
        self.payload += payload
        self.sent += b"%x\r\n%b\r\n" % (len(payload), payload)

    def write_framed(self, framed: bytes) -> None:
        assert self.framed
        self.sent += framed
        self.payload += dechunk(framed + b"0\r\n\r\n")

    def end(self) -> None:
        self.ended = True


class Exchange:
    def __init__(self, path: str, body: bytes, framed: bool = True) -> None:
        self.endpoint = ALLOW[path]
        self.client: Any = Written(framed)
        self.call = openai.parse(self.endpoint, {}, body, ask_usage=True)
        self.meter = Meter("r0")
        self.tpot_s = 0.1
        self.results: list[Result] = []
        self.head: Head | None = None
        self.firsts = 0

    def commit(self, head: Head, length: int | None, now: float) -> None:
        assert self.head is None
        self.head = head

    def on_first_content(self, now: float) -> None:
        self.firsts += 1

    def on_result(self, result: Result) -> None:
        self.results.append(result)

    def error_event(self, failure: Any, sequence: int) -> bytes:
        return b'data: {"error":"ours"}\n\n'


def play(path: str, body: bytes, pieces: list[bytes], framed: bool = True) -> tuple[Exchange, Relay]:
    exchange = Exchange(path, body, framed)
    relay = Relay(exchange, 0.0)
    pool = Pool("http://replica")
    pool.close()  # keeps nothing for later
    connection = UpstreamConnection(pool)
    transport: Any = SimpleNamespace(
        write=lambda data: None,
        writelines=lambda parts: None,
        abort=lambda: None,
        resume_reading=lambda: None,
        is_closing=lambda: False,
    )
    connection.connection_made(transport)
    relay.connection = connection
    connection.send(b"POST", [b"request"], relay)
    for piece in pieces:
        connection.data_received(piece)
    connection.eof_received()
    return exchange, relay


RECORDED = [
    ("sse-chat.txt", 0, "/v1/chat/completions", 4, None),
    ("sse-chat-usage.txt", 0, "/v1/chat/completions", 4, Usage(17, 4, 0)),
    ("sse-chat-continuous-usage.txt", 0, "/v1/chat/completions", 4, Usage(17, 4, 0)),
    ("sse-completions-usage.txt", 0, "/v1/completions", 4, Usage(6, 4, 0)),
    ("sse-responses-messages-n.txt", 0, "/v1/responses", 2, Usage(17, 3, 0)),
    ("sse-responses-messages-n.txt", 1, "/v1/messages", 2, Usage(17, 3, 0)),
    ("sse-responses-messages-n.txt", 2, "/v1/completions", 8, None),
]


@pytest.mark.parametrize(("capture", "section", "path", "content", "usage"), RECORDED)
def test_cut_at_every_byte(capture: str, section: int, path: str, content: int, usage: Usage | None) -> None:
    _, body, chunks = reads(capture, section)
    whole = b"".join(chunks)
    expected = dechunk(whole.partition(b"\r\n\r\n")[2])
    own = path in ("/v1/responses", "/v1/messages") or b"include_usage" in body or b'"n":2' in body
    for cut in range(1, len(whole)):
        exchange, relay = play(path, body, [whole[:cut], whole[cut:]])
        assert exchange.client.ended, cut
        if own:
            assert exchange.client.payload == expected, cut
            assert exchange.client.sent + b"0\r\n\r\n" == whole.partition(b"\r\n\r\n")[2], cut
        else:
            assert exchange.client.payload.endswith(b"data: [DONE]\n\n"), cut
        assert [r.failure for r in exchange.results] == [None], cut
        assert (relay.content_events, exchange.firsts) == (content, 1), cut
        assert relay.scan.usage == usage, cut


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(RECORDED), st.integers(0, 2**32), st.booleans())
def test_cut_into_many_pieces(recorded: Any, seed: int, framed: bool) -> None:
    capture, section, path, content, usage = recorded
    _, body, chunks = reads(capture, section)
    whole = b"".join(chunks)
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, len(whole)), rng.randint(1, 60)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    exchange, relay = play(path, body, pieces, framed)
    uncut, _ = play(path, body, [whole], framed)
    assert exchange.client.payload == uncut.client.payload
    assert relay.content_events == content
    assert relay.scan.usage == usage


@pytest.mark.parametrize(
    ("capture", "path"),
    [("sse-chat-usage.txt", "/v1/chat/completions"), ("sse-completions-usage.txt", "/v1/completions")],
)
def test_usage_withheld_whatever_the_cut(capture: str, path: str) -> None:
    """The client did not ask; the replica answers as asked by us. Cut at every byte, the client sees no usage."""
    _, _, chunks = reads(capture)
    body = b'{"model":"tiny","stream":true}'
    whole = b"".join(chunks)
    uncut, _ = play(path, body, [whole])
    assert b'"usage"' not in uncut.client.payload
    assert uncut.client.payload.count(b"system_fingerprint") == 1
    assert b'"finish_reason":"length"' in uncut.client.payload
    for cut in range(1, len(whole)):
        exchange, _ = play(path, body, [whole[:cut], whole[cut:]])
        assert exchange.client.payload == uncut.client.payload, cut


def test_nothing_reaches_the_client_before_content() -> None:
    _, body, chunks = reads("sse-responses-messages-n.txt", 0)
    head_and_envelopes = chunks[:5]
    exchange, relay = play("/v1/responses", body, head_and_envelopes)
    assert exchange.head is None
    assert exchange.client.sent == b""
    assert [r.failure.detail for r in exchange.results if r.failure] == ["early_end"]
    assert relay.content_events == 0


def test_end_without_terminal_event_is_an_error_event_and_no_done() -> None:
    _, body, chunks = reads("sse-completions.txt")
    exchange, _ = play("/v1/completions", body, chunks[:3])
    assert exchange.client.payload.endswith(b'data: {"error":"ours"}\n\n')
    assert b"[DONE]" not in exchange.client.payload
    assert [r.failure.detail for r in exchange.results if r.failure] == ["early_end"]


def test_half_an_event_is_never_forwarded() -> None:
    """The client could not tell a cut event from a whole one, and the error event would be lost behind it."""
    _, body, chunks = reads("sse-completions.txt")
    exchange, _ = play("/v1/completions", body, [*chunks[:3], chunks[3][:100]])
    events = exchange.client.payload.split(b"\n\n")
    assert events[-2] == b'data: {"error":"ours"}'
    assert all(event.endswith(b"]}") for event in events[:-2])


def chunk(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


def said(text: bytes) -> bytes:
    return b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n' % text


@pytest.mark.parametrize("odd", [said(b""), b": comment\n\n", said(b"two") + said(b"in one chunk"), said(b"x" * 5000)])
def test_events_of_one_read_count_as_if_each_had_come_alone(odd: bytes) -> None:
    """Reads hold several events whenever the loop is behind; what is not of the usual shape may stand among them."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    usual = [said(b"%d" % i) for i in range(12)]  # lengths with one digit more and less
    events = [*usual[:5], odd, *usual[5:]]
    end = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    body = b'{"model":"tiny","stream":true,"messages":[],"stream_options":{"include_usage":true}}'
    alone, relay = play("/v1/chat/completions", body, [head, *map(chunk, events), end])
    for size in (2, 3, 7, 13):
        reads_ = [chunk(*events[at : at + size]) for at in range(0, len(events), size)]
        merged, same = play("/v1/chat/completions", body, [head, *reads_, end])
        assert merged.client.sent == alone.client.sent == chunk(*events, b"data: [DONE]\n\n")
        assert same.content_events == relay.content_events == sum(e.count(b"content") - e.count(b'""') for e in events)
        assert merged.meter.idle_gaps == alone.meter.idle_gaps == relay.content_events - 1
