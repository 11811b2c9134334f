"""The client against a scripted server: reuse, stale connections, cuts, and closing when it is told to."""

from __future__ import annotations

import asyncio
import time

import pytest

from loadtests.answer import Answer
from loadtests.client import BadUrlError, Client, Target
from policies.objectives import Partition
from tests.loadtests.scripted import HEAD, LAST, Call, full_answer, piece, scripted, until, usage

BODY = b'{"max_tokens":3}'
PATH = "/v1/chat/completions"


def client_for(url: str) -> Client:
    return Client(Target.parse(url), time.perf_counter)


async def test_a_stream_is_read_to_its_end_and_the_connection_used_again() -> None:
    async with scripted(full_answer) as server:
        client = client_for(server.url)
        for _ in range(3):
            answer = Answer(forced_tokens=3)
            headers = await client.send(PATH, BODY, answer)
            assert answer.fault() is None
            assert headers["x-forebay-replica"] == "r0"
        assert (client.opened, client.reused, server.connections) == (1, 2, 1)
        client.close()


async def test_nothing_caps_how_many_run_at_once() -> None:
    """A pool limit (100 in a common client) would close the loop without a word."""
    waiting, go = 0, asyncio.Event()

    async def script(call: Call) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == 150:
            go.set()
        await go.wait()
        await full_answer(call)

    async with scripted(script) as server:
        client = client_for(server.url)
        answers = [Answer() for _ in range(150)]
        await asyncio.gather(*(client.send(PATH, BODY, a) for a in answers))
        assert all(a.fault() is None for a in answers)
        client.close()


async def test_a_stale_connection_is_replaced_once_without_a_trace() -> None:
    async def script(call: Call) -> None:
        if call.number == 1:
            call.cut()  # what a server does that closed its keep-alive meanwhile
        else:
            await full_answer(call)

    async with scripted(script) as server:
        client = client_for(server.url)
        await client.send(PATH, BODY, Answer())
        answer = Answer()
        await client.send(PATH, BODY, answer)
        assert answer.fault() is None
        assert (len(server.calls), server.connections) == (3, 2)
        client.close()


async def test_a_fresh_connection_that_breaks_is_an_error() -> None:
    async def script(call: Call) -> None:
        call.cut()

    async with scripted(script) as server:
        client = client_for(server.url)
        answer = Answer()
        with pytest.raises(ConnectionError):
            await client.send(PATH, BODY, answer)
        assert answer.fault() == (Partition.ERROR_TRANSPORT, "no_response")
        assert len(server.calls) == 1


async def test_a_cut_in_the_middle_keeps_what_came_before() -> None:
    async def script(call: Call) -> None:
        await call.send(HEAD)
        await call.event(piece("a"))
        call.writer.close()

    async with scripted(script) as server:
        answer = Answer()
        with pytest.raises(ConnectionError):
            await client_for(server.url).send(PATH, BODY, answer)
        assert answer.content_events == 1
        assert answer.fault() == (Partition.TRUNCATED, "connection_cut")


async def test_cancelling_closes_the_connection_at_once() -> None:
    async def script(call: Call) -> None:
        await call.send(HEAD)
        await call.event(piece("a"))

    async with scripted(script) as server:
        client = client_for(server.url)
        answer = Answer()
        sending = asyncio.ensure_future(client.send(PATH, BODY, answer))
        await until(lambda: answer.content_events == 1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await until(lambda: server.hung_up == 1)


async def test_a_json_error_in_reply_to_a_stream_request_is_read_as_such() -> None:
    async def script(call: Call) -> None:
        await call.plain(429, {"error": {"code": "infeasible", "message": "m", "type": "t"}}, "retry-after: 2")

    async with scripted(script) as server:
        answer = Answer()
        headers = await client_for(server.url).send(PATH, BODY, answer)
        assert answer.fault() == (Partition.REJECTED, "infeasible")
        assert headers["retry-after"] == "2"


async def test_a_body_that_ends_with_the_connection_is_complete() -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        await call.send(b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n')
        await call.send(b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\ndata: [DONE]\n\n')
        call.writer.close()

    async with scripted(script) as server:
        answer = Answer()
        await client_for(server.url).send(PATH, BODY, answer)
        assert answer.fault() is None


async def test_a_100_continue_before_the_answer_is_ignored() -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await full_answer(call)

    async with scripted(script) as server:
        answer = Answer()
        await client_for(server.url).send(PATH, BODY, answer)
        assert (answer.status, answer.fault()) == (200, None)


async def test_warm_connections_are_used() -> None:
    async with scripted(full_answer) as server:
        client = client_for(server.url)
        await client.warm(4)
        await asyncio.gather(*(client.send(PATH, BODY, Answer()) for _ in range(4)))
        assert (client.opened, client.reused) == (4, 4)
        client.close()


async def test_the_key_and_the_path_prefix_are_sent() -> None:
    async with scripted(full_answer) as server:
        client = Client(Target.parse(server.url + "/base/v1"), time.perf_counter, api_key="sk-1")
        await client.send(PATH, BODY, Answer())
        assert server.calls[0].path == "/base/v1/chat/completions"
        assert server.calls[0].headers["authorization"] == "Bearer sk-1"
        client.close()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://h:99999"])
def test_a_bad_url_is_named(url: str) -> None:
    with pytest.raises(BadUrlError, match=r"--url"):
        Target.parse(url)


def test_a_bracketed_address_keeps_its_brackets_in_the_host_header() -> None:
    assert Target.parse("http://[::1]:8000").authority == "[::1]:8000"


async def test_an_answer_split_at_every_byte_reads_the_same() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"ab"},"finish_reason":"stop"}]}\n\n'

    async def script(call: Call) -> None:
        await call.send(HEAD)
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        for i in range(len(chunk)):
            await call.send(chunk[i : i + 1])
            await asyncio.sleep(0)
        await call.event(usage(1, 1), b"data: [DONE]\n\n")
        await call.send(LAST)

    async with scripted(script) as server:
        answer = Answer()
        await client_for(server.url).send(PATH, BODY, answer)
        assert (answer.fault(), answer.content_events) == (None, 1)
