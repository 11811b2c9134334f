"""One request from receipt to its record, as a coroutine that reads top to bottom.

admit -> (decision -> attempt) until an answer, a refusal, or nobody to answer -> close. Streams are written by the
attempt's callbacks (`relay.py`) while this coroutine sleeps. What arrives from outside (a decision, the end of
an attempt, the client leaving) is put into a field and wakes it; a leaving client stops the attempt in the callback
itself. `close` is the one place where a request ends: core, tenant, record, sink.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from gateway import answer, errors, headers, retry, timeline
from gateway.admit import Admission, admit
from gateway.client import Client, ClientGoneError, Scope
from gateway.driven import Driven
from gateway.endpoints import Endpoint, Kind
from gateway.errors import Api, Code, GatewayError
from gateway.headers import Headers
from gateway.http1 import Break, Head, UpstreamConnection
from gateway.openai import Call
from gateway.pulses import Meter
from gateway.record import Attempt, RequestRecord
from gateway.relay import Mode, Relay, Result
from gateway.request_head import RequestHead
from gateway.retry import Failure
from gateway.signals import Sign
from gateway.upstream import ConnectError, Pool
from policies.model import Abort, Decision, Dispatch, Hold, Outcome, Shed, Usage

if TYPE_CHECKING:
    from gateway.proxy import Proxy

log = logging.getLogger("forebay.proxy")
_SSE: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_NO_BUFFER = (b"x-accel-buffering", b"no")


class Exchange(Driven):
    """`client.Listener` and `scheduler.Owner` of one request."""

    # what a new one starts with; set on the instance where it changes
    admission: Admission | None = None
    relay: Relay | None = None
    started = False  # the head of an answer is written
    tpot_s: float | None = None
    _comment_at = 0.0  # when our next keep-alive comment is due; 0: none
    _decision: Decision | None = None
    _result: Result | None = None
    _gone = False
    _deciding = False
    _connecting: asyncio.Task[UpstreamConnection] | None = None
    _usage: Usage | None = None
    meter: Meter
    call: Call

    def __init__(
        self, proxy: Proxy, scope: Scope, client: Client, endpoint: Endpoint, head: RequestHead | None = None
    ) -> None:
        self.proxy = proxy
        self.scope = scope
        self.client = client
        self.endpoint = endpoint
        self.head = head
        self.headers = dict(reversed(scope["headers"])) if head is None else head.first
        self.request_id = headers.request_id(self.headers.get(b"x-request-id"))
        self.record = RequestRecord(self.request_id.decode("latin-1"), time.monotonic(), endpoint=endpoint.name)

    # -- the request ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        client, record, limits = self.client, self.record, self.proxy.config.limits
        client.listener = self
        record.outcome = Outcome.CANCELLED  # what a cancelled task leaves behind
        try:
            tenant = self.proxy.authenticate(self.headers)
            body = await client.read_body(limits.max_body_bytes, limits.body_timeout_s, self.proxy.door)
            record.received_at = time.monotonic()
            record.received_unix = time.time()
            self.admission = admit(self.proxy, self.endpoint, self.scope, self.headers, tenant, body, record)
            del body  # a long stream need not hold it
            self.proxy.live.add(self)
            self.proxy.scheduler.tick()
            await self._serve(self.admission)
        except GatewayError as error:
            self._refuse(error)
        except ClientGoneError:
            record.reason = record.reason or "client_left"
        except Exception:
            log.exception("request %s failed inside the gateway", record.request_id)
            self._refuse(GatewayError(Code.INTERNAL, "the gateway failed; its log has the request id"))
        finally:
            self._close()

    async def _serve(self, admission: Admission) -> None:
        admission.start(self)
        while True:
            decision = await self._decided()
            if isinstance(decision, Shed):
                raise self.proxy.refusal(admission, decision, self.record)
            assert isinstance(decision, Dispatch)
            attempt, result = await self._attempt(admission, decision)
            failure = await self._judge(attempt, result)
            if failure is None:
                return
            relay = self.relay
            assert relay is not None
            if relay.passing or relay.mode is Mode.PASS:
                self.record.outcome = Outcome.EXPIRED if failure is retry.EXPIRED else Outcome.TRUNCATED
                self.record.reason = failure.detail
                return
            if failure is not retry.PREEMPTED and not self._again(admission, failure):
                self._give_up(failure, result)
                return

    def _again(self, admission: Admission, failure: Failure) -> bool:
        """Whether another attempt follows; its decision is then on the way."""
        now = time.monotonic()
        deadline = admission.request.deadline
        record, proxy = self.record, self.proxy
        if not (failure.retriable and self.endpoint.retry) or len(record.attempts) >= proxy.config.retry.max_attempts:
            return False
        if (deadline is not None and now >= deadline) or not proxy.budget.take(now):
            return False
        if self._decision is None:
            admission.failed(self, failure.outcome)
        if isinstance(self._decision, Shed):
            proxy.budget.give_back()
            return False
        return True

    @property
    def held(self) -> bool:
        """Whether it waits for a decision: never dispatched, or taken back."""
        return self._deciding and self._decision is None

    async def _decided(self) -> Decision:
        self._deciding = True
        while self._decision is None:
            await self._sleep()
        self._deciding = False
        decision, self._decision = self._decision, None
        return decision

    async def _attempt(self, admission: Admission, decision: Dispatch) -> tuple[Attempt, Result]:
        now = time.monotonic()
        self._result = None  # of an attempt that the core took back while its end was looked at
        record = self.record
        record.choice_reason, record.prediction = decision.reason, decision.prediction
        record.alternatives = decision.alternatives
        attempt = record.attempt(decision.replica_id, now)
        self.meter = self.proxy.scheduler.dispatched(decision.replica_id)
        self.tpot_s = admission.request.tpot_s
        self.call = admission.call
        self.relay = relay = Relay(self, now)
        pool = self.proxy.pool(decision.replica_id)
        if pool is None:
            return attempt, Result(retry.BREAKS[Break.REFUSED])
        result = await self._exchange(admission, pool, relay)
        if result.stale:
            # the replica closed the idle connection just now: the same attempt once more, on a new connection
            self.relay = relay = Relay(self, now)
            result = await self._exchange(admission, pool, relay, fresh=True)
        return attempt, result

    async def _exchange(self, admission: Admission, pool: Pool, relay: Relay, fresh: bool = False) -> Result:
        connection = None if fresh else pool.take()
        if connection is None:
            try:
                connection = await self._connect(pool)
            except ConnectError as e:
                return Result(retry.BREAKS[e.kind])
        if self._gone or self._result is not None:
            pool.give(connection)
        if self._gone:
            raise ClientGoneError
        if self._result is None:
            relay.connection = connection
            connection.send(self.scope["method"].encode(), admission.message(pool, self), relay)
        while self._result is None:
            await self._sleep()
        result, self._result = self._result, None
        return result

    async def _connect(self, pool: Pool) -> UpstreamConnection:
        connecting = self._connecting = asyncio.ensure_future(pool.connect())
        connecting.add_done_callback(lambda _: self.wake())
        try:
            while not connecting.done():
                await self.pause()
            if connecting.cancelled():
                raise ClientGoneError
            return connecting.result()
        finally:
            connecting.cancel()
            self._connecting = None

    async def _judge(self, attempt: Attempt, result: Result) -> Failure | None:
        """Looks at the end of an attempt and answers the client where it is an answer. None: done."""
        relay = self.relay
        assert relay is not None
        failure, record = result.failure, self.record
        self._usage = relay.scan.usage
        if failure is None and result.head is not None:
            failure = retry.of_status(result.head.status, result.body)
            if failure is None:
                if self.endpoint.kind is Kind.GENERATE:
                    reading = answer.read(self.endpoint.api, result.body)
                    self._usage = reading.usage
                    if reading.response_id:
                        self.proxy.made(reading.response_id, attempt.replica_id)
                    if reading.aborted:
                        failure = retry.ABORT
                if failure is None:
                    self._respond(result.head, result.body)
            elif failure.detail == "http_500" and await self._refuses(attempt.replica_id):
                failure = retry.ENGINE_DEAD
        elif relay.scan.first_id:
            self.proxy.made(relay.scan.first_id, attempt.replica_id)
        attempt.t_first = relay.first_at or None
        attempt.outcome = Outcome.SUCCESS if failure is None else failure.outcome
        attempt.detail = "" if failure is None else failure.detail
        if failure is None:
            record.outcome = Outcome.SUCCESS
            if not relay.content_events:
                self.proxy.fleet.observed(attempt.replica_id, Sign.OK)
        elif failure is not retry.EXPIRED and failure is not retry.PREEMPTED:
            self.proxy.fleet.observed(attempt.replica_id, failure.sign)
        return failure

    async def _refuses(self, replica_id: str) -> bool:
        """Whether the replica that answered 500 takes no connection any more: its engine died under the request."""
        pool = self.proxy.pool(replica_id)
        if pool is None:
            return True
        try:
            pool.give(await self._connect(pool))
        except ConnectError:
            return True
        return False

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

    def _give_up(self, failure: Failure, result: Result) -> None:
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
            self._refuse(retry.told(failure), failure)

    def _refuse(self, error: GatewayError, failure: Failure | None = None) -> None:
        record = self.record
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

    # -- what comes from outside ---------------------------------------------------------------------------------

    def on_decision(self, decision: Decision) -> None:
        if isinstance(decision, Hold):
            return
        if isinstance(decision, Abort):
            if decision.requeue:
                self._decision = None  # where it was to go, if it had not gone yet
                if self._deciding:
                    return
                if self.relay is not None:
                    self.relay.stop()
                self._result = Result(retry.PREEMPTED)
            elif self.relay is not None:
                self.relay.fail(retry.EXPIRED)
        else:
            self._decision = decision
        self.wake()

    def on_result(self, result: Result) -> None:
        self._result = result
        self.wake(at_once=result.failure is None)

    def on_first_content(self, now: float) -> None:
        self.record.first_content_at = now
        replica_id = self.record.attempts[-1].replica_id
        if self.admission is not None:
            self.admission.first_token(replica_id)
        self.proxy.fleet.observed(replica_id, Sign.OK)

    def on_gone(self) -> None:
        self._gone = True
        if self.relay is not None:
            self.relay.stop()
        if self._connecting is not None:
            self._connecting.cancel()
        self.wake()

    def on_pause(self) -> None:
        if self.relay is not None and self.relay.connection is not None:
            self.relay.connection.pause_reading()

    def on_resume(self) -> None:
        if self.relay is not None and self.relay.connection is not None:
            self.relay.last_event_at = time.monotonic()  # silence until here was ours
            self.relay.connection.resume_reading()

    def on_tick(self, now: float) -> None:
        """Deadlines of this request; called about four times a second."""
        admission, relay = self.admission, self.relay
        if admission is None:
            return
        if relay is not None:
            failure = self.proxy.overdue(relay, admission, self.client.paused, now)
            if failure is not None:
                relay.fail(failure)
                return
        if not admission.call.streams or self.endpoint.kind is not Kind.GENERATE or self.endpoint.api is Api.OTHER:
            return
        stream = self.proxy.config.stream
        if not self.started and now - self.record.received_at > stream.commit_after_s:
            self.started = True
            self.record.status = 200
            self.client.start(200, [*self._headers(_SSE, now), _NO_BUFFER], None)
            self.record.committed_at = self._comment_at = now
        if self._comment_at and now >= self._comment_at:
            self._comment_at = now + stream.keep_alive_comment_s
            self.client.write(b": keep-alive\n\n")

    async def _sleep(self) -> None:
        if self._gone:
            raise ClientGoneError
        await self.pause()
        if self._gone:
            raise ClientGoneError

    # -- the end -------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Everything that a request holds is given back here, once."""
        record, relay = self.record, self.relay
        self.proxy.live.discard(self)
        if self.client.listener is self:
            self.client.listener = None
        record.ended_at = time.monotonic()
        if relay is not None:
            if not relay.over:
                relay.stop()
            record.content_events = relay.content_events
            record.last_content_at = relay.last_at or None
            record.longest_gap_s = relay.longest_gap_s
            self.relay = None  # each knows the other: without this only the garbage collector could free them
        if self.admission is not None:
            self.admission.close(record, self._usage, relay)
        record.partition = timeline.partition(record)
        self.proxy.finished(record)
