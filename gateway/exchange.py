"""One request from receipt to its record, as a coroutine that reads top to bottom.

admit -> (decision -> attempt) until an answer, a refusal, or nobody to answer -> close. Streams are written by the
attempt's callbacks (`relay.py`) while this coroutine sleeps. What arrives from outside (a decision, the end of
an attempt, the client leaving) is put into a field and wakes it; a leaving client stops the attempt in the callback
itself. What it does between two waits is `course.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time

from gateway import retry
from gateway.admit import Admission, admit
from gateway.client import ClientGoneError
from gateway.course import Course, is_500
from gateway.errors import Code, GatewayError
from gateway.http1 import Break, UpstreamConnection
from gateway.record import Attempt
from gateway.relay import Mode, Relay
from gateway.result import Result
from gateway.upstream import ConnectError, Pool
from policies.model import Decision, Dispatch, Outcome, Shed

log = logging.getLogger("forebay.proxy")


class Exchange(Course):
    """The coroutine of one request."""

    async def run(self) -> None:
        client, record, limits = self.client, self.record, self.proxy.config.limits
        client.listener = self
        record.outcome = Outcome.CANCELLED  # what a cancelled task leaves behind
        try:
            tenant = self.proxy.authenticate(self.headers)
            if tenant is not None:
                record.tenant = tenant.name
            body = client.take_body(limits.max_body_bytes)
            if body is None:
                body = await client.read_body(limits.max_body_bytes, limits.body_timeout_s, self.proxy.door)
            record.received_at = time.monotonic()
            record.received_unix = time.time()
            self.admission = admit(self.proxy, self.endpoint, self.scope, self.headers, tenant, body, record)
            del body  # a long stream need not hold it
            self.proxy.live.add(self)
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
            dead = is_500(result) and await self._refuses(attempt.replica_id)
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
