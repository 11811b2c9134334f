"""What a request does that has to wait more than once, as a coroutine that reads top to bottom.

receive -> (decision -> attempt) until an answer, a refusal, or nobody to answer -> close. What arrives from outside (a
decision, the end of an attempt, the client leaving) is put into a field of the exchange and wakes this; a client that
leaves stops the attempt in the callback itself. `run` is all of it; `resume` goes on where `exchange.py` stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from gateway import retry
from gateway.client import ClientGoneError
from gateway.connecting import ConnectError, connect
from gateway.course import is_500
from gateway.http1 import Break, UpstreamConnection
from gateway.record import Attempt
from gateway.relay import Mode, Relay
from gateway.result import Result
from gateway.retry import Failure
from gateway.upstream import Pool
from policies.model import Decision, Dispatch, Outcome, Shed

if TYPE_CHECKING:
    from gateway.exchange import Exchange


async def run(exchange: Exchange) -> None:
    """A request from its receipt on."""
    exchange.enter()
    await _to_the_end(exchange, _receive(exchange))


async def resume(
    exchange: Exchange,
    attempt: Attempt | None = None,
    *,
    sent: bool = False,
    judged: tuple[Result, Failure] | None = None,
) -> None:
    """An admitted request: from its next decision on or, where there is an `attempt`, from where that stands."""
    await _to_the_end(exchange, _serve(exchange, attempt, sent, judged))


async def _to_the_end(exchange: Exchange, steps: Coroutine[Any, Any, None]) -> None:
    """Whatever comes of these, the request is answered as far as it can be, and closed."""
    try:
        await steps
    except ClientGoneError:
        exchange.record.reason = exchange.record.reason or "client_left"
    except Exception as error:
        exchange.fail(error)
    finally:
        exchange.close()


async def _receive(exchange: Exchange) -> None:
    tenant = exchange.tenant()
    limits, client = exchange.proxy.config.limits, exchange.client
    body = client.take_body(limits.max_body_bytes)
    if body is None:
        body = await client.read_body(limits.max_body_bytes, limits.body_timeout_s, exchange.proxy.door)
    exchange.receive(tenant, body)
    del body  # a long stream need not hold it
    await _serve(exchange)


async def _serve(
    exchange: Exchange,
    attempt: Attempt | None = None,
    sent: bool = False,
    judged: tuple[Result, Failure] | None = None,
) -> None:
    admission = exchange.admission
    assert admission is not None
    failed: tuple[Failure, Result] | None = None  # what the attempt before came to
    while True:
        if attempt is None:
            decision = await _decided(exchange) if exchange.decision is None else exchange.take_decision()
            if isinstance(decision, Shed):
                if failed is not None and decision.reason == "no_replica":  # no other: a core elsewhere says so late
                    exchange.proxy.budget.give_back()
                    exchange.give_up(*failed)
                    return
                raise exchange.proxy.refusal(admission, decision, exchange.record)
            assert isinstance(decision, Dispatch)
            attempt = exchange.begun(admission, decision)
        if judged is None:
            result = await _attempt(exchange, attempt, sent)
            dead = is_500(result) and await _refuses(exchange, attempt.replica_id)
            failure = exchange.judge(attempt, result, dead)
            if failure is None:
                return
        else:
            result, failure = judged
        relay = exchange.relay
        assert relay is not None
        if relay.passing or relay.mode is Mode.PASS:
            exchange.record.outcome = Outcome.EXPIRED if failure is retry.EXPIRED else Outcome.TRUNCATED
            exchange.record.reason = failure.detail
            return
        if failure is not retry.PREEMPTED and not exchange.again(admission, failure):
            exchange.give_up(failure, result)
            return
        failed = None if failure is retry.PREEMPTED else (failure, result)
        attempt, sent, judged = None, False, None


async def _decided(exchange: Exchange) -> Decision:
    exchange.deciding = True
    while exchange.decision is None:
        if exchange.gone:
            raise ClientGoneError
        await exchange.pause()
        if exchange.gone:
            raise ClientGoneError
    exchange.deciding = False
    return exchange.take_decision()


async def _attempt(exchange: Exchange, attempt: Attempt, sent: bool) -> Result:
    """One coroutine, since each level of them is paid for at every wake. `sent`: it is out already."""
    pool = exchange.proxy.pool(attempt.replica_id)
    relay, admission = exchange.relay, exchange.admission
    assert relay is not None
    assert admission is not None
    connection = None if sent or pool is None else pool.take()
    while True:
        if not sent:
            if pool is None:
                return Result(retry.BREAKS[Break.REFUSED])
            if connection is None:
                try:
                    connection = await _connect(exchange, pool)
                except ConnectError as e:
                    if e.kind is Break.NO_SOCKET:
                        exchange.proxy.door.refused["sockets"] += 1
                    return Result(retry.BREAKS[e.kind])
            if exchange.gone or exchange.result is not None:
                pool.give(connection)
            if exchange.gone:
                raise ClientGoneError
            if exchange.result is None:
                relay.connection = connection
                connection.send(exchange.method, admission.message(pool, exchange), relay)
        elif exchange.gone:
            raise ClientGoneError
        while exchange.result is None:
            await exchange.pause()
            if exchange.gone:
                raise ClientGoneError
        result, exchange.result = exchange.result, None
        if not result.stale:
            return result
        # the replica closed the idle connection just now: the same attempt once more, on a new connection
        exchange.relay = relay = Relay(exchange, attempt.t_dispatch)
        connection, sent = None, False


async def _connect(exchange: Exchange, pool: Pool) -> UpstreamConnection:
    connecting = exchange.connecting = asyncio.ensure_future(connect(pool))
    connecting.add_done_callback(lambda _: exchange.wake())
    try:
        while not connecting.done():
            await exchange.pause()
        if connecting.cancelled():
            raise ClientGoneError
        return connecting.result()
    finally:
        connecting.cancel()
        exchange.connecting = None


async def _refuses(exchange: Exchange, replica_id: str) -> bool:
    """Whether the replica that answered 500 takes no connection any more: its engine died under the request."""
    pool = exchange.proxy.pool(replica_id)
    if pool is None:
        return True
    try:
        pool.give(await _connect(exchange, pool))
    except ConnectError as e:
        return e.kind in (Break.REFUSED, Break.RESET)
    return False
