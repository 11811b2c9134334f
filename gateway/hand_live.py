"""The live page's stream at a hand: the core is asked for a snapshot each second, as any of its pages is.

What crosses the link is whole answers (`relayed.py`), so the stream is made here of many of them. The core computes one
snapshot for all that ask within a second. While no core answers, the stream is silent and the page says how old it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import MutableMapping
from typing import Any

from gateway.client import Receive, Scope, Send
from gateway.live import INTERVAL_S, MOST_VIEWERS
from gateway.relayed import Asking, Whole

_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Viewers:
    """Who looks through this hand."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._closed = asyncio.Event()
        self._count = 0

    def close(self) -> None:
        """Ends every stream."""
        self._closed.set()

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One viewer, until it leaves. A refusal of the core is passed on as it is."""
        status, headers, history = await self._ask(scope, b"history=true")
        if self._count >= MOST_VIEWERS:
            status, headers, history = 503, [(b"content-type", b"text/plain")], b"too many viewers\n"
        if status != 200:
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": history})
            return
        self._count += 1
        left = asyncio.ensure_future(_left(receive))
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _SSE})
            await _say(send, b"retry: 1000\n\nevent: history\ndata: %b\n\n" % history)
            while not left.done() and not closed.done():
                status, _, snapshot = await self._ask(scope, b"")
                if status == 200:
                    await _say(send, b"event: snapshot\ndata: %b\n\n" % snapshot)
                await asyncio.wait({left, closed}, timeout=INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            with contextlib.suppress(OSError):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._count -= 1
            left.cancel()
            closed.cancel()

    async def _ask(self, scope: Scope, query: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """/admin/snapshot of the core, asked in the viewer's name."""
        inner = {**scope, "path": "/admin/snapshot", "raw_path": b"/admin/snapshot", "query_string": query}
        answer = Whole(503)

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        await self._asking(inner, receive, answer.send)
        return answer.status, answer.headers, answer.body


async def _say(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
