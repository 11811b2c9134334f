"""A replica whose every byte is written by the test, the gateway in front of it, and a client that counts bytes."""

from __future__ import annotations

import ast
import asyncio
import random
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from gateway import asgi, wire
from gateway.config import Config, parse
from gateway.fleet import Fleet
from gateway.proxy import Proxy
from gateway.record import RequestRecord
from gateway.replica import Model, Replica
from gateway.scheduler import Scheduler
from policies import registry
from policies.core import Balancer
from policies.settings import Settings

CAPTURES = Path(__file__).parent.parent / "captures"
CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"where is the river"}],"max_tokens":4,"stream":true}'


@dataclass
class Seen:
    """A request as the replica received it."""

    head: bytes
    body: bytes

    @property
    def line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    def header(self, name: bytes) -> bytes | None:
        found = re.search(rb"\r\n" + re.escape(name) + rb": ([^\r\n]*)", self.head, re.IGNORECASE)
        return None if found is None else found[1]


Script = Callable[["Connection", Seen], Awaitable[None]]


class Connection:
    """The replica's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.closed_by_peer = asyncio.Event()

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def peer_left(self) -> None:
        """Returns when the gateway has closed its side."""
        try:
            while await self.reader.read(4096):
                pass
        except ConnectionError:
            pass
        self.closed_by_peer.set()


@dataclass
class ScriptedReplica:
    """Answers each request with `script`. `seen` holds the requests in order."""

    script: Script
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    server: asyncio.Server | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self, host: str = "127.0.0.1", **kwargs: Any) -> None:
        self.server = await asyncio.start_server(self._serve, host, 0, limit=1 << 22, **kwargs)
        self.port = self.server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length[1])) if length else b""
                request = Seen(head, body)
                self.seen.append(request)
                await self.script(Connection(reader, writer), request)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def stop(self) -> None:
        assert self.server is not None
        self.server.close()
        for writer in list(self.writers):
            writer.transport.abort()
        await self.server.wait_closed()


class Client:
    """One client connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, body: bytes, headers: str = "") -> None:
        await self.send(
            f"POST {path} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n{headers}"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )

    async def answer(self, head_only: bool = False) -> Answer:
        """Reads one whole answer."""
        head = await self.head()
        if head_only:
            return Answer(head, b"", b"")
        headers = head.lower()
        if b"transfer-encoding: chunked" in headers:
            raw: list[bytes] = []
            body: list[bytes] = []
            while True:
                line = await self.reader.readuntil(b"\r\n")
                size = int(line, 16)
                chunk = await self.reader.readexactly(size + 2)
                raw += (line, chunk)
                if size == 0:
                    return Answer(head, b"".join(body), b"".join(raw))
                body.append(chunk[:-2])
        length = re.search(rb"content-length: (\d+)", headers)
        if length is not None:
            whole = await self.reader.readexactly(int(length[1]))
        else:
            whole = await self.reader.read(-1)
        return Answer(head, whole, whole)

    async def head(self) -> bytes:
        while True:
            head = await self.reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 100"):
                return head

    async def closed(self) -> bytes:
        """What still comes until the gateway closes."""
        try:
            return await self.reader.read(-1)
        except ConnectionResetError:
            return b""

    def close(self) -> None:
        self.writer.transport.abort()


@dataclass
class Answer:
    head: bytes
    body: bytes
    raw: bytes

    @property
    def status(self) -> int:
        return int(self.head[9:12])

    def header(self, name: str) -> str | None:
        found = re.search(rf"\r\n{name}: ([^\r\n]*)", self.head.decode("latin-1"), re.IGNORECASE)
        return None if found is None else found[1]


@dataclass
class Gateway:
    """The data path alone: no scrapes, no probes; every replica is taken as healthy."""

    proxy: Proxy
    fleet: Fleet
    scheduler: Scheduler
    records: list[RequestRecord]
    port: int
    protocols: list[Any]
    ended: asyncio.Condition

    async def connect(self, receive_buffer: int | None = None) -> Client:
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 24)
        return Client(reader, writer)

    async def post(self, path: str, body: bytes, headers: str = "") -> Answer:
        client = await self.connect()
        try:
            await client.post(path, body, headers)
            return await client.answer()
        finally:
            client.close()

    async def record(self, number: int = 1) -> RequestRecord:
        """The record of the `number`th request to end; waits for it."""
        async with asyncio.timeout(60), self.ended:
            await self.ended.wait_for(lambda: len(self.records) >= number)
        return self.records[number - 1]

    @property
    def in_flight(self) -> int:
        return sum(r.ledger.in_flight for r in self.scheduler.balancer.fleet.replicas.values())


@asynccontextmanager
async def gateway(
    *replicas: ScriptedReplica | str,
    settings: str = "",
    policy: str = "round_robin",
    spliced: bool = True,
    ca_file: str | None = None,
) -> AsyncIterator[Gateway]:
    """A gateway before started replicas (or URLs). `settings` is TOML; `spliced` false: plain ASGI."""
    config: Config = parse(settings)
    balancer = Balancer(config.service_classes(), registry.make(policy), Settings().without_science(), random.Random(0))
    scheduler = Scheduler(balancer)
    fleet = Fleet(config.health, scheduler.fleet_event)
    for at, replica in enumerate(replicas):
        url = replica if isinstance(replica, str) else f"http://127.0.0.1:{replica.port}"
        fleet.add(
            Replica(f"r{at}", url, ca_file=ca_file, fixed_models=("tiny",), models={"tiny": Model("tiny")}, learnt=True)
        )
        for event in fleet.health.probed(f"r{at}", None, 0.0):
            scheduler.fleet_event(event)
    records: list[RequestRecord] = []
    ended = asyncio.Condition()

    async def tell() -> None:
        async with ended:
            ended.notify_all()

    tasks: set[asyncio.Task[None]] = set()

    def sink(record: RequestRecord) -> None:
        records.append(record)
        task = asyncio.get_running_loop().create_task(tell())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    proxy = Proxy(scheduler, fleet, config, sink)
    scheduler.start()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if not spliced:
            scope["extensions"] = {}
        await asgi.serve(proxy, scope, receive, send)

    protocol = wire.protocol(
        max_header_bytes=config.limits.max_header_bytes,
        body_timeout_s=config.limits.body_timeout_s,
        client_stall_s=config.timeouts.client_stall_s,
        proxied=proxy if spliced else None,
    )
    served = uvicorn.Config(
        application,
        http=protocol,
        lifespan="off",
        log_level="critical",
        ws="none",
        proxy_headers=False,
    )
    served.load()
    server = uvicorn.Server(served)
    loop = asyncio.get_running_loop()
    protocols: list[Any] = []

    def make() -> asyncio.Protocol:
        made = served.http_protocol_class(config=served, server_state=server.server_state, app_state={}, _loop=loop)
        protocols.append(made)
        return made  # type: ignore[no-any-return]

    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    listening = await loop.create_server(make, sock=sock)
    try:
        yield Gateway(proxy, fleet, scheduler, records, sock.getsockname()[1], protocols, ended)
    finally:
        listening.close()
        for made in protocols:
            if made.transport is not None:
                made.transport.abort()
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)
        scheduler.stop()
        proxy.close()


@asynccontextmanager
async def replica(script: Script, **kwargs: Any) -> AsyncIterator[ScriptedReplica]:
    made = ScriptedReplica(script)
    await made.start(**kwargs)
    try:
        yield made
    finally:
        await made.stop()


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Waits for something that has no event of its own."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def reads(capture: str, section: int = 0) -> tuple[bytes, bytes, list[bytes]]:
    """A recorded exchange: request head and body as sent, and the reads of the response in order."""
    text = (CAPTURES / capture).read_text()
    parts = re.split(r"^>>> ", text, flags=re.MULTILINE)
    body = parts[section + 1] if len(parts) > 1 else text
    head, _, rest = body.partition("\n\n")
    request_body = rest.split("\n+", 1)[0].strip() if not rest.startswith("+") else ""
    chunks = [ast.literal_eval(m) for m in re.findall(r"^\+ *[\d.]+ms (b'.*'|b\".*\")$", body, flags=re.MULTILINE)]
    return head.encode(), request_body.encode(), chunks


def playing(chunks: list[bytes]) -> Script:
    """A script that answers every request with these bytes, each flushed on its own."""

    async def script(connection: Connection, request: Seen) -> None:
        await connection.send(*chunks)
        if b"connection: close" in chunks[0].split(b"\r\n\r\n")[0].lower():
            connection.writer.close()

    return script


def dechunk(data: bytes) -> bytes:
    body = b""
    while data:
        line, _, data = data.partition(b"\r\n")
        size = int(line, 16)
        body, data = body + data[:size], data[size + 2 :]
        if size == 0:
            break
    return body
