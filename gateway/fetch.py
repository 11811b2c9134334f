"""The gateway's own requests to a replica (its health, metrics and models), over connections like those of streams.

They are a second apart and never on a request's path, but in the loop that decides, where each holds up whatever else
came in that moment: `python -m loadtests.bench fetch` compares them with httpx, which is the usual tool for this. An
answer is had whole within its time and below `MOST_BYTES`, or not at all: one that trickles or never ends must neither
stop the watch of its replica nor fill the memory. Uncompressed, since it costs both sides less and cannot explode.
Where this loop itself was late no replica is to be blamed (`patience.py`).
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import orjson

from gateway.connecting import ConnectError, connect
from gateway.http1 import Break, Head, UpstreamConnection
from gateway.patience import Patience
from gateway.replica import Replica
from gateway.signals import Sign
from gateway.upstream import Pool

MOST_BYTES = 16 * 1024 * 1024  # of an answer; vLLM's pages of metrics have 50 KB
SIGNS = {Break.NO_SOCKET: Sign.OURS, Break.REFUSED: Sign.REFUSED, Break.CONNECT_TIMEOUT: Sign.PROBE_LATE}


class FetchError(Exception):
    """No whole answer. The text says why, in words for the operator; `sign` what it shows about the replica."""

    def __init__(self, said: str, sign: Sign = Sign.PROBE_FAILED) -> None:
        super().__init__(said)
        self.sign = sign


class FetchTimeoutError(FetchError):
    """None within its time."""


class _StaleError(Exception):
    """The replica closed the idle connection just then, and saw nothing of the request."""


class Fetcher:
    """Requests to one replica, wherever it is at the moment. Proxy variables of the environment play no part."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._pool = self._new_pool()

    def _new_pool(self) -> Pool:
        replica = self._replica
        return Pool(replica.url, connect_timeout_s=None, ca_file=replica.ca_file, key=replica.key)

    def close(self) -> None:
        self._pool.close()

    async def fetch(self, path: str, timeout_s: float, body: Any = None) -> tuple[int, bytes]:
        """Status and body of a GET, or of a POST of `body` as JSON. Raises FetchError for whatever went wrong."""
        if self._pool.url != self._replica.url:  # it moved
            self._pool.close()
            self._pool = self._new_pool()
        pool = self._pool
        method = b"GET" if body is None else b"POST"
        message = _message(pool, method, path, body)
        try:
            async with Patience(timeout_s):
                try:
                    return await _exchange(pool.take() or await connect(pool), method, message)
                except _StaleError:
                    return await _exchange(await connect(pool), method, message)
        except TimeoutError:
            raise FetchTimeoutError(f"took longer than {timeout_s:g} s", Sign.PROBE_LATE) from None
        except ConnectError as e:
            raise FetchError(f"could not be read: {e}", _sign(e)) from None
        except _StaleError:
            raise FetchError("could not be read: the connection was closed before an answer came") from None


def _sign(error: ConnectError) -> Sign:
    if isinstance(error.cause, ssl.SSLError):
        return Sign.TLS
    return SIGNS.get(error.kind, Sign.PROBE_FAILED)


def _message(pool: Pool, method: bytes, path: str, body: Any) -> bytes:
    lines = [
        b"%b %b%b HTTP/1.1" % (method, pool.prefix, path.encode()),
        b"host: " + pool.authority,
        b"user-agent: forebay",  # web application firewalls turn away who gives none
        b"accept: */*",
        b"accept-encoding: identity",
    ]
    if pool.authorization is not None:
        lines.append(b"authorization: " + pool.authorization)
    content = b"" if body is None else orjson.dumps(body)
    if body is not None:
        lines += [b"content-type: application/json", b"content-length: %d" % len(content)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


async def _exchange(connection: UpstreamConnection, method: bytes, message: bytes) -> tuple[int, bytes]:
    answer = _Answer()
    try:
        connection.send(method, [message], answer)
        return await answer.whole
    finally:
        if not answer.over:
            connection.abort()  # it holds the rest of an answer that nobody reads


class _Answer:
    """`http1.Receiver` of one answer, gathered."""

    def __init__(self) -> None:
        self.whole: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.over = False  # the connection is its pool's again
        self._status = 0
        self._body = bytearray()

    def on_head(self, head: Head) -> None:
        self._status = head.status

    def on_whole(self, head: Head, body: bytes) -> None:
        self.on_head(head)
        self.on_data(body, None)
        self.on_end()

    def on_data(self, payload: bytes, framed: bytes | None) -> None:
        self._body += payload
        if len(self._body) > MOST_BYTES:
            self._body.clear()  # the rest comes until the connection is closed, within this turn
            self._failed(FetchError(f"could not be read: the answer is larger than {MOST_BYTES} bytes"))

    def on_chunk(self, framed: bytes, start: int) -> None:
        self.on_data(framed[start:-2], None)

    def on_chunks(self, framed: bytes) -> bool:
        return False

    def on_end(self) -> None:
        self.over = True
        if not self.whole.done():
            self.whole.set_result((self._status, bytes(self._body)))

    def on_break(self, kind: Break, stale: bool) -> None:
        self.over = True
        said = "what it sent is no HTTP answer" if kind is Break.MALFORMED else "the connection broke off"
        self._failed(_StaleError() if stale else FetchError(f"could not be read: {said}"))

    def _failed(self, error: Exception) -> None:
        if not self.whole.done():
            self.whole.set_exception(error)
