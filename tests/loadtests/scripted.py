"""A server that plays a script: what it sends, when it waits and how it hangs up is the test's to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\nx-forebay-replica: r0\r\n\r\n"
)
LAST = b"0\r\n\r\n"


@dataclass
class Call:
    """One request as the server read it, and the means to answer it."""

    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    number: int  # from 0, over all connections

    @property
    def json(self) -> dict[str, object]:
        parsed: dict[str, object] = orjson.loads(self.body)
        return parsed

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
        await self.writer.drain()

    async def event(self, *payloads: object) -> None:
        """Each payload as one SSE event in one HTTP chunk; bytes go as they are."""
        for payload in payloads:
            block = payload if isinstance(payload, bytes) else b"data: " + orjson.dumps(payload) + b"\n\n"
            self.writer.write(b"%x\r\n%b\r\n" % (len(block), block))
        await self.writer.drain()

    async def plain(self, status: int, body: object, *headers: str) -> None:
        data = orjson.dumps(body)
        head = "".join(f"{h}\r\n" for h in (f"HTTP/1.1 {status} X", "content-type: application/json", *headers))
        await self.send(head.encode() + b"content-length: %d\r\n\r\n" % len(data), data)

    def cut(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Call], Awaitable[None]]


@dataclass
class Server:
    url: str
    calls: list[Call] = field(default_factory=list)
    connections: int = 0
    hung_up: int = 0  # connections that the client closed


def piece(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


def usage(prompt: int, output: int, cached: int = 0) -> dict[str, object]:
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


async def full_answer(call: Call, tokens: int | None = None, cached: int = 0) -> None:
    """A complete stream of as many tokens as were asked for."""
    n = tokens or int(str(call.json.get("max_tokens", 3)))
    await call.send(HEAD)
    for i in range(n):
        await call.event(piece("x", "length" if i == n - 1 else None))
    await call.event(usage(10, n, cached), b"data: [DONE]\n\n")
    await call.send(LAST)


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[Server]:
    tasks: set[asyncio.Task[None]] = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        server.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode("latin-1").split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                call = Call(first.split()[1], headers, body, writer, len(server.calls))
                server.calls.append(call)
                await script(call)
        except (asyncio.IncompleteReadError, ConnectionError):
            server.hung_up += 1
        except asyncio.CancelledError:
            pass  # the end of the test; asyncio logs cancelled connection tasks as errors
        finally:
            tasks.discard(task)
            writer.close()

    listener = await asyncio.start_server(converse, "127.0.0.1", 0)
    server = Server(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    try:
        yield server
    finally:
        listener.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Waits for a condition, not for a time; TimeoutError when it never comes."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - conditions over sockets have no event to wait for
            await asyncio.sleep(0.001)
