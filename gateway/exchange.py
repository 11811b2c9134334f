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

from gateway import answer, retry, timeline
from gateway.admit import Admission, admit
from gateway.client import ClientGoneError
from gateway.endpoints import Kind
from gateway.errors import Api, Code, GatewayError
from gateway.http1 import Break, UpstreamConnection
from gateway.openai import Call
from gateway.pulses import Meter
from gateway.record import Attempt
from gateway.relay import Mode, Relay, Result
from gateway.reply import Reply
from gateway.retry import Failure
from gateway.signals import Sign
from gateway.upstream import ConnectError, Pool
from policies.model import Abort, Decision, Dispatch, Hold, Outcome, Shed, Usage

if TYPE_CHECKING:
    pass

log = logging.getLogger("forebay.proxy")


class Exchange(Reply):
    """`client.Listener` and `scheduler.Owner` of one request."""

    # what a new one starts with; set on the instance where it changes
    relay: Relay | None = None
    tpot_s: float | None = None
    _decision: Decision | None = None
    _result: Result | None = None
    _gone = False
    _deciding = False
    _connecting: asyncio.Task[UpstreamConnection] | None = None
    _usage: Usage | None = None
    meter: Meter
    call: Call

    # -- the request ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        client, record, limits = self.client, self.record, self.proxy.config.limits
        client.listener = self
        record.outcome = Outcome.CANCELLED  # what a cancelled task leaves behind
        try:
            tenant = self.proxy.authenticate(self.headers)
            record.tenant = None if tenant is None else tenant.name
            body = client.take_body(limits.max_body_bytes)
            if body is None:
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
            decision = await self._decided() if self._decision is None else self._take_decision()
            if isinstance(decision, Shed):
                raise self.proxy.refusal(admission, decision, self.record)
            assert isinstance(decision, Dispatch)
            attempt = self._started(admission, decision)
            result = await self._attempt(admission, attempt)
            dead = _is_500(result) and await self._refuses(attempt.replica_id)
            failure = self._judge(attempt, result, dead)
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
            if self._gone:
                raise ClientGoneError
            await self.pause()
            if self._gone:
                raise ClientGoneError
        self._deciding = False
        return self._take_decision()

    def _take_decision(self) -> Decision:
        decision, self._decision = self._decision, None
        assert decision is not None
        return decision

    def _started(self, admission: Admission, decision: Dispatch) -> Attempt:
        now = time.monotonic()
        self._result = None  # of an attempt that the core took back while its end was looked at
        record = self.record
        record.choice_reason, record.prediction = decision.reason, decision.prediction
        record.alternatives = decision.alternatives
        attempt = record.attempt(decision.replica_id, now)
        self.meter = self.proxy.scheduler.dispatched(decision.replica_id)
        self.tpot_s = admission.request.tpot_s
        self.call = admission.call
        self.relay = Relay(self, now)
        return attempt

    async def _attempt(self, admission: Admission, attempt: Attempt) -> Result:
        """One coroutine, since each level of them is paid for at every wake: the usual request waits here once."""
        pool = self.proxy.pool(attempt.replica_id)
        if pool is None:
            return Result(retry.BREAKS[Break.REFUSED])
        relay = self.relay
        assert relay is not None
        connection = pool.take()
        while True:
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
                connection.send(self._method, admission.message(pool, self), relay)
            while self._result is None:
                await self.pause()
                if self._gone:
                    raise ClientGoneError
            result, self._result = self._result, None
            if not result.stale:
                return result
            # the replica closed the idle connection just now: the same attempt once more, on a new connection
            self.relay = relay = Relay(self, attempt.t_dispatch)
            connection = None

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

    def _judge(self, attempt: Attempt, result: Result, dead: bool) -> Failure | None:
        """Looks at the end of an attempt and answers the client where it is an answer. None: done.

        dead: the replica takes no connection any more."""
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
            elif dead:
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
        self._keep_alive(now)

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


def _is_500(result: Result) -> bool:
    """A 500 that may be the request's own fault, or the last word of an engine."""
    head = result.head
    if head is None or head.status != 500 or result.failure is not None:
        return False
    meant = retry.of_status(500, result.body)
    return meant is not None and meant.detail == "http_500"
