"""What a client is told: heads and bodies of answers, refusals before the answer began, error events after.

The half of an exchange that writes. Our own headers (request id, replica, reason, times) go with every answer; a head
is written once, early (`commit_after_s`) or with the first content. Trade-off: a base of `Exchange` and not an object
of its own, since a request is one object on the hot path and both halves read the same record.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gateway import errors, headers, retry
from gateway.admit import Admission
from gateway.client import Client, Scope
from gateway.driven import Driven
from gateway.endpoints import Endpoint
from gateway.errors import GatewayError
from gateway.headers import Headers
from gateway.http1 import Head
from gateway.record import RequestRecord
from gateway.request_head import RequestHead
from gateway.result import Result
from gateway.retry import Failure
from policies.model import Decision, Outcome

if TYPE_CHECKING:
    from gateway.proxy import Proxy

_SSE: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_NO_BUFFER = (b"x-accel-buffering", b"no")


_METHODS = {"POST": b"POST"}


class Reply(Driven):
    # what a new one starts with; set on the instance where it changes
    admission: Admission | None = None
    started = False  # the head of an answer is written
    _comment_at = 0.0  # when our next keep-alive comment is due; 0: none

    def __init__(
        self, proxy: Proxy, scope: Scope, client: Client, endpoint: Endpoint, head: RequestHead | None = None
    ) -> None:
        self.proxy = proxy
        self.scope = scope
        self.method: bytes = _METHODS.get(scope["method"]) or scope["method"].encode()
        self.client = client
        self.endpoint = endpoint
        self.head = head
        self.headers = dict(reversed(scope["headers"])) if head is None else head.first
        self.request_id = headers.request_id(self.headers.get(b"x-request-id"))
        self.record = RequestRecord(self.request_id.decode("latin-1"), time.monotonic())
        self.record.endpoint = endpoint.name
        self.decision: Decision | None = None  # not as a default of the class: mypyc gives none to a union of several

    def commit(self, head: Head, length: int | None, now: float) -> None:
        """The head of a streamed or long answer, unless it went out early."""
        self._comment_at = 0.0
        self.record.committed_at = now
        if self.admission is not None:
            self.admission.committed(self.record.attempts[-1].replica_id)
        if not self.started:
            self.started = True
            self.record.status = head.status
            lines = self._headers(head.headers, now)
            if length is None:
                lines.append(_NO_BUFFER)
            self.client.start(head.status, lines, length)

    def _respond(self, head: Head, body: bytes) -> None:
        now = time.monotonic()
        self.record.committed_at = self.record.committed_at or now
        self.record.status = head.status
        self.started = True
        if head.lines is not None and self.client.framed and self.scope["method"] != "HEAD":
            self.client.respond_joined(head.status, head.lines + self.record.own_lines(self.request_id, now), body)
            return
        said = head.get(b"content-length") if self.scope["method"] == "HEAD" else None
        self.client.respond(head.status, self._headers(head.headers, now), body, None if said is None else int(said))

    def _headers(self, given: Headers, now: float) -> Headers:
        return headers.downstream(given) + headers.split(self.record.own_lines(self.request_id, now))

    def _keep_alive(self, now: float) -> None:
        """A stream without content for long: the head of the answer, then comments, so that proxies keep it open."""
        stream = self.proxy.config.stream
        if not self.started and now - self.record.received_at > stream.commit_after_s:
            self.started = True
            self.record.status = 200
            self.client.start(200, [*self._headers(_SSE, now), _NO_BUFFER], None)
            self.record.committed_at = self._comment_at = now
        if self._comment_at and now >= self._comment_at:
            self._comment_at = now + stream.keep_alive_comment_s
            self.client.write(b": keep-alive\n\n")

    def give_up(self, failure: Failure, result: Result) -> None:
        """The last attempt failed and no other follows: the replica's own words where it had any."""
        if result.head is not None and failure is not retry.ABORT and not self.started:
            self.record.outcome, self.record.reason = failure.outcome, failure.detail
            self._respond(result.head, result.body)
        elif result.status is not None and not self.started:
            self.record.outcome, self.record.reason = failure.outcome, failure.detail
            self._respond(Head(result.status, [errors.JSON_TYPE], None, False), result.body)
        elif result.body.startswith(b"{") and failure is not retry.ABORT:
            self.record.outcome, self.record.reason = failure.outcome, failure.detail
            self.client.write(errors.event_of(result.body, self.endpoint.api))
            self.client.end()
        else:
            self.refuse(retry.told(failure), failure)

    def refuse(self, error: GatewayError, failure: Failure | None = None) -> None:
        record = self.record
        if self.admission is None and not record.policy:  # refused before its class was settled
            tenants = self.proxy.tenants
            record.service_class = tenants.likely_class(record.tenant, self.headers.get(b"x-service-class", b""))
        record.reason = error.code if failure is None else failure.detail
        record.outcome = retry.OF_CODE.get(error.code, Outcome.CLIENT_ERROR) if failure is None else failure.outcome
        api = self.endpoint.api
        if self.started:
            self.client.write(errors.event(error, api, record.request_id))
            self.client.end()
            return
        self.started = True
        record.status = error.status
        lines = [*errors.headers(error, self.proxy.rng), (b"x-request-id", self.request_id)]
        self.client.respond(error.status, lines, errors.body(error, api, record.request_id))

    def error_event(self, failure: Failure, sequence: int) -> bytes:
        return errors.event(retry.told(failure), self.endpoint.api, self.record.request_id, sequence)
