"""How an attempt at a replica ends, and who is told."""

from __future__ import annotations

from typing import Protocol

from gateway.client import Client
from gateway.endpoints import Endpoint
from gateway.http1 import Head
from gateway.openai import Call
from gateway.pulses import Meter
from gateway.retry import Failure


class Result:
    """How the attempt ended. `head` and `body`: a collected answer or error that nobody has seen yet.

    `status`: one that stood inside a stream."""

    __slots__ = ("body", "failure", "head", "stale", "status")

    def __init__(
        self,
        failure: Failure | None = None,
        head: Head | None = None,
        body: bytes = b"",
        stale: bool = False,
        status: int | None = None,
    ) -> None:
        self.failure = failure
        self.head = head
        self.body = body
        self.stale = stale
        self.status = status


class Asker(Protocol):
    """The request that an attempt is made for."""

    endpoint: Endpoint
    client: Client
    call: Call
    meter: Meter
    tpot_s: float | None

    def commit(self, head: Head, length: int | None, now: float) -> None: ...

    def on_first_content(self, now: float) -> None: ...

    def on_result(self, result: Result) -> None: ...

    def error_event(self, failure: Failure, sequence: int) -> bytes: ...
