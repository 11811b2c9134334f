"""What happens to one request between its waits: attempts begin and are judged, news arrives, the record is closed.

The half of an exchange that never waits; the order of things is the coroutine's (`exchange.py`). Whatever comes from
outside is put into a field and wakes that. `_close` is the one place where a request ends: core, tenant, record, sink.
"""

from __future__ import annotations

import asyncio
import time

from gateway import answer, retry, timeline
from gateway.admit import Admission
from gateway.endpoints import Kind
from gateway.errors import Api
from gateway.http1 import UpstreamConnection
from gateway.openai import Call
from gateway.pulses import Meter
from gateway.record import Attempt
from gateway.relay import Relay
from gateway.reply import Reply
from gateway.result import Result
from gateway.retry import Failure
from gateway.signals import Sign
from policies.model import Abort, Decision, Dispatch, Hold, Outcome, Shed, Usage


class Course(Reply):
    """`client.Listener` and `scheduler.Owner` of one request."""

    # what a new one starts with; set on the instance where it changes
    relay: Relay | None = None
    tpot_s: float | None = None
    result: Result | None = None
    gone = False
    deciding = False
    connecting: asyncio.Task[UpstreamConnection] | None = None
    _usage: Usage | None = None
    meter: Meter
    call: Call

    # -- decisions and attempts ----------------------------------------------------------------------------------

    def again(self, admission: Admission, failure: Failure) -> bool:
        """Whether another attempt follows; its decision is then on the way."""
        now = time.monotonic()
        deadline = admission.request.deadline
        record, proxy = self.record, self.proxy
        if not (failure.retriable and self.endpoint.retry) or len(record.attempts) >= proxy.config.retry.max_attempts:
            return False
        if (deadline is not None and now >= deadline) or not proxy.budget.take(now):
            return False
        if self.decision is None:
            admission.failed(self, failure.outcome)
        if isinstance(self.decision, Shed):
            proxy.budget.give_back()
            return False
        return True

    @property
    def held(self) -> bool:
        """Whether it waits for a decision: never dispatched, or taken back."""
        return self.deciding and self.decision is None

    def take_decision(self) -> Decision:
        decision, self.decision = self.decision, None
        assert decision is not None
        return decision

    def begun(self, admission: Admission, decision: Dispatch) -> Attempt:
        now = time.monotonic()
        self.result = None  # of an attempt that the core took back while its end was looked at
        record = self.record
        record.choice_reason, record.prediction = decision.reason, decision.prediction
        record.alternatives = decision.alternatives
        attempt = record.attempt(decision.replica_id, now)
        self.meter = self.proxy.scheduler.dispatched(decision.replica_id)
        self.tpot_s = admission.request.tpot_s
        self.call = admission.call
        self.relay = Relay(self, now)
        return attempt

    def judge(self, attempt: Attempt, result: Result, dead: bool) -> Failure | None:
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

    # -- what comes from outside ---------------------------------------------------------------------------------

    def on_decision(self, decision: Decision) -> None:
        if isinstance(decision, Hold):
            return
        if isinstance(decision, Abort):
            if decision.requeue:
                self.decision = None  # where it was to go, if it had not gone yet
                if self.deciding:
                    return
                if self.relay is not None:
                    self.relay.stop()
                self.result = Result(retry.PREEMPTED)
            elif self.relay is not None:
                self.relay.fail(retry.EXPIRED)
        else:
            self.decision = decision
        self.wake()

    def on_result(self, result: Result) -> None:
        self.result = result
        self.wake(at_once=result.failure is None)

    def on_first_content(self, now: float) -> None:
        self.record.first_content_at = now
        replica_id = self.record.attempts[-1].replica_id
        if self.admission is not None:
            self.admission.first_token(replica_id)
        self.proxy.fleet.observed(replica_id, Sign.OK)

    def on_gone(self) -> None:
        self.gone = True
        if self.relay is not None:
            self.relay.stop()
        if self.connecting is not None:
            self.connecting.cancel()
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

    def close(self) -> None:
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


def is_500(result: Result) -> bool:
    """A 500 that may be the request's own fault, or the last word of an engine."""
    head = result.head
    if head is None or head.status != 500 or result.failure is not None:
        return False
    meant = retry.of_status(500, result.body)
    return meant is not None and meant.detail == "http_500"
