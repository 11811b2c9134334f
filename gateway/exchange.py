"""One request on its usual way, without a coroutine: admitted, dispatched and sent in the read that brought it, judged
and closed in the read that brought its answer. Streams are written by the attempt's callbacks (`relay.py`) in between.

A decision that is late (the core's in another process, or the request is held) goes on from the callback that brings
it. Whatever is not usual (a body still on its way, a refusal, a connection to be opened, a failed attempt, a
client that leaves, a request taken back) goes on as the coroutine of `waits.py`, from the very point reached here.
Trade-off: the first steps stand here and there; but what has no coroutine can be compiled (`deploy/compile.py`), and
that saves most of the CPU of a request (loadtests/results.md).
"""

from __future__ import annotations

import asyncio
import logging
import time

from gateway import waits
from gateway.admit import admit
from gateway.course import Course, is_500
from gateway.errors import Code, GatewayError
from gateway.record import Attempt
from gateway.result import Result
from gateway.tenants import Tenant
from policies.model import Dispatch, Outcome

log = logging.getLogger("forebay.proxy")


class Exchange(Course):
    """One per request. `begin` serves it by callbacks, `waits.run` inside a task."""

    _sent: Attempt | None = None  # the attempt whose end is waited for without a coroutine
    _asked = False  # its first decision is waited for without one

    # -- the usual way -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Serves a request whose body is there, as far as that goes now."""
        self.enter()
        body = self.client.take_body(self.proxy.rules.most_body_bytes)
        if body is None:
            self.drive(waits.run(self))  # it knows what is wrong with it
            return
        try:
            self.receive(self.tenant(), body)
            if self.decision is None:
                self.deciding = self._asked = True
            else:
                self._go()
        except Exception as error:
            self.fail(error)
            self.close()

    def _go(self) -> None:
        """Acts on its first decision."""
        attempt = self._dispatched()
        if attempt is None:
            self.drive(waits.resume(self))
        elif not self._send(attempt):
            self.drive(waits.resume(self, attempt))

    def _answered(self) -> None:
        """Something came while its first decision was waited for."""
        if self.gone:
            self.decision = None  # whatever it is, nobody wants it any more
        elif self.decision is None:  # taken back before it was acted on
            self._asked = True
            return
        self.deciding = False
        try:
            self._go()
        except Exception as error:
            self.fail(error)
            self.close()

    def _dispatched(self) -> Attempt | None:
        """Its first attempt, where the core sends it at once."""
        admission, decision = self.admission, self.decision
        if admission is None or not isinstance(decision, Dispatch):
            return None
        self.take_decision()
        return self.begun(admission, decision)

    def _send(self, attempt: Attempt) -> bool:
        """Whether there is a connection that it could go out on."""
        pool, relay, admission = self.proxy.pool(attempt.replica_id), self.relay, self.admission
        connection = None if pool is None else pool.take()
        if pool is None or connection is None or relay is None or admission is None:
            return False
        self._sent = attempt
        relay.connection = connection
        connection.send(self.method, admission.message(pool, self), relay)
        return True

    def on_result(self, result: Result) -> None:
        attempt = self._sent
        if attempt is None or result.failure is not None or is_500(result):
            super().on_result(result)
            return
        self._sent = None
        try:
            failure = self.judge(attempt, result, False)
        except Exception as error:
            self.fail(error)
        else:
            if failure is not None:
                self.drive(waits.resume(self, attempt, judged=(result, failure)))
                return
        self.close()

    def wake(self, at_once: bool = False) -> None:
        if self._asked:
            self._asked = False
            asyncio.get_running_loop().call_soon(self._answered)
            return
        attempt = self._sent
        if attempt is not None:
            self._sent = None
            self.ready(waits.resume(self, attempt, sent=True))
        super().wake(at_once)

    # -- what both ways are made of ------------------------------------------------------------------------------

    def enter(self) -> None:
        self.client.listener = self
        self.record.outcome = Outcome.CANCELLED  # what a cancelled task leaves behind

    def tenant(self) -> Tenant | None:
        """Raises GatewayError."""
        tenant = self.proxy.authenticate(self.headers)
        if tenant is not None:
            self.record.tenant = tenant.name
        return tenant

    def receive(self, tenant: Tenant | None, body: bytes) -> None:
        """The whole request is here: it is admitted, and asks the core for a replica. Raises GatewayError."""
        record, proxy = self.record, self.proxy
        record.received_at = time.monotonic()
        record.received_unix = time.time()
        admission = self.admission = admit(proxy, self.endpoint, self.scope, self.headers, tenant, body, record)
        proxy.live.add(self)
        admission.start(self)

    def fail(self, error: Exception) -> None:
        """What was raised becomes an answer."""
        if isinstance(error, GatewayError):
            self.refuse(error)
        else:
            log.error("request %s failed inside the gateway", self.record.request_id, exc_info=error)
            self.refuse(GatewayError(Code.INTERNAL, "the gateway failed; its log has the request id"))
