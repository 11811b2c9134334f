"""The control plane of the core, asked through any hand: one ASGI request as a message, one whole answer back.

The hand says who asks (address, headers), so the core's own rules about tokens and loopback hold as in one process.
Bodies are configuration and pages of metrics: small, and never streams. The hand bounds them by `MOST_BODY_BYTES`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gateway.client import Receive, Scope, Send
from gateway.hand_link import HandLink
from gateway.messages import Message, To

MOST_BODY_BYTES = 4 * 1024 * 1024
ANSWER_S = 15.0
log = logging.getLogger("forebay.control")
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Whole:
    """An ASGI application's answer as one piece. `status` is what it stays at where none comes."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""

    async def send(self, event: MutableMapping[str, Any]) -> None:
        if event["type"] == "http.response.start":
            self.status, self.headers = event["status"], list(event["headers"])
        else:
            self.body += event.get("body", b"")


class Asked:
    """The core's side: runs the control plane's application for a hand. Keeps the tasks."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, hand: HandLink, message: Message) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(hand, *message[1:]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, hand: HandLink, number: int, said: MutableMapping[str, Any], body: str) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": said["method"],
            "scheme": said["scheme"],
            "path": said["path"],
            "raw_path": said["raw_path"].encode("latin-1"),
            "query_string": said["query"].encode("latin-1"),
            "root_path": "",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in said["headers"]],
            "client": None if said["client"] is None else tuple(said["client"]),
            "server": None if said["server"] is None else tuple(said["server"]),
            "extensions": {},
            "state": {},
        }
        given = [{"type": "http.request", "body": body.encode("latin-1"), "more_body": False}]
        over = asyncio.Event()
        answer = Whole(500)

        async def receive() -> MutableMapping[str, Any]:
            if not given:
                await over.wait()
                return {"type": "http.disconnect"}
            return given.pop()

        async with self._turn:  # one a turn of the loop, as in one process
            await asyncio.sleep(0)
        try:
            await self._application(scope, receive, answer.send)
        except Exception:
            log.exception("the control plane failed at %s", said["path"])
        over.set()
        lines = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in answer.headers]
        hand.link.tell([To.ANSWER, number, answer.status, lines, answer.body.decode("latin-1")])


class Asking:
    """The hand's side: an ASGI application that asks the core. `tell` answers False while there is none."""

    def __init__(self, tell: Callable[[Message], bool]) -> None:
        self._tell = tell
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Message]] = {}

    def answered(self, message: Message) -> None:
        waiting = self._waiting.pop(message[1], None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def nobody(self) -> None:
        """The core is gone: what was asked is not answered any more."""
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            one.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts, more, size = [], True, 0
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                return
            parts.append(event.get("body", b""))
            size += len(parts[-1])
            more = event.get("more_body", False)
            if size > MOST_BODY_BYTES:
                await _plain(send, 413, b"the body is too large\n")
                return
        number = next(self._numbers)
        said = {
            "method": scope["method"],
            "scheme": scope.get("scheme", "http"),
            "path": scope["path"],
            "raw_path": scope["raw_path"].decode("latin-1"),
            "query": scope["query_string"].decode("latin-1"),
            "headers": [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]],
            "client": scope.get("client"),
            "server": scope.get("server"),
        }
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            if not self._tell([To.ASK, number, said, b"".join(parts).decode("latin-1")]):
                raise TimeoutError
            async with asyncio.timeout(ANSWER_S):
                await asyncio.wait([waiting])
            _, _, status, headers, body = waiting.result()
        except (TimeoutError, asyncio.CancelledError):
            if not waiting.cancelled() and (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            await _plain(send, 503, b"the core of this gateway does not answer; try again in a second\n")
            return
        finally:
            self._waiting.pop(number, None)
        lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await send({"type": "http.response.start", "status": status, "headers": lines})
        await send({"type": "http.response.body", "body": body.encode("latin-1")})


async def _plain(send: Send, status: int, body: bytes) -> None:
    lines = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})
