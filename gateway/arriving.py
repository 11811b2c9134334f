"""Waiting for the body of a request that did not come whole: what a `cycle.SplicedCycle` does as coroutines.

Beside it and not in it because it may be compiled, and nothing that is compiled waits.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from gateway.client import ClientGoneError, too_large, too_slow
from gateway.door import Door

if TYPE_CHECKING:
    from gateway.cycle import SplicedCycle


async def read_body(cycle: SplicedCycle, limit_bytes: int, timeout_s: float, door: Door) -> bytes:
    cycle.limit_bytes = limit_bytes
    cycle.flow.resume_reading()  # a large body may have come whole and paused it: the client's end would go unseen
    if cycle.more_body and not cycle.disconnected:
        declared = next((value for name, value in cycle.scope["headers"] if name == b"content-length"), b"0")
        if int(declared) > limit_bytes:
            raise too_large(limit_bytes)
        cycle.go_on()
        cycle.waiter = cycle.protocol.loop.create_future()
        cycle.receipt = receipt = door.receipt()
        try:
            async with asyncio.timeout(timeout_s):
                cycle.arrived()
                await cycle.waiter
        except TimeoutError:
            raise too_slow(timeout_s) from None
        finally:
            cycle.waiter = cycle.receipt = None
            receipt.close()
    if cycle.disconnected:
        raise ClientGoneError
    if cycle.size > limit_bytes:
        raise too_large(limit_bytes)
    body = cycle.take_body(limit_bytes)
    assert body is not None  # it is whole, and no larger than it may be
    return body


async def receive(cycle: SplicedCycle) -> Any:
    cycle.go_on()
    waits = not cycle.parts and (cycle.more_body or cycle.was_read)  # an empty body is one too
    if waits and not cycle.disconnected and not cycle.response_complete:
        cycle.flow.resume_reading()  # it may stand still: what is there is handed over first
        cycle.message_event.clear()
        await cycle.message_event.wait()
    if cycle.disconnected or cycle.response_complete:
        return {"type": "http.disconnect"}
    body = b"".join(cycle.parts)
    cycle.parts.clear()
    cycle.size = 0
    cycle.was_read = not cycle.more_body
    cycle.flow.resume_reading()
    return {"type": "http.request", "body": body, "more_body": cycle.more_body}
