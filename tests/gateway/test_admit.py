"""What the core is told of a request that was let in."""

from __future__ import annotations

import asyncio

from gateway.tenants import digest
from policies.model import Request
from tests.gateway.scripted import CHAT, Connection, Gateway, Seen, gateway, replica
from tests.gateway.test_failures import GOOD_STREAM

KEY = "sk-team"
TEAM = f'[tenants.team]\nkeys_sha256 = ["{digest(KEY).hex()}"]\nweight = 3.0\n'


class Waiting:
    """A replica that answers when the test lets go."""

    def __init__(self) -> None:
        self.got, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, connection: Connection, request: Seen) -> None:
        self.got.set()
        await self.go_on.wait()
        await connection.send(*GOOD_STREAM)


async def told(g: Gateway, waiting: Waiting, headers: str) -> Request:
    """The request as the core has it while the replica works on it."""
    client = await g.connect()
    await client.post("/v1/chat/completions", CHAT, headers)
    await waiting.got.wait()
    (exchange,) = g.proxy.live
    assert exchange.admission is not None
    request = exchange.admission.request
    waiting.go_on.set()
    assert (await client.answer()).status == 200
    client.close()
    return request


async def test_the_weight_of_its_tenant_goes_with_a_request() -> None:
    waiting = Waiting()
    async with replica(waiting) as a, gateway(a, settings=TEAM) as g:
        request = await told(g, waiting, f"Authorization: Bearer {KEY}\r\n")
    assert (request.tenant, request.tenant_weight, request.pinned) == ("team", 3.0, None)
    waiting = Waiting()
    async with replica(waiting) as a, gateway(a) as g:
        request = await told(g, waiting, "")
    assert (request.tenant, request.tenant_weight) == (None, 1.0)


async def test_what_official_clients_say_of_their_retries_is_recorded() -> None:
    for said, noted in (("2", 2), ("0", 0), ("-1", 0), ("many", 0), ("99999999999", 0)):
        waiting = Waiting()
        async with replica(waiting) as a, gateway(a) as g:
            await told(g, waiting, f"x-stainless-retry-count: {said}\r\n")
            assert (await g.record()).client_retry == noted
