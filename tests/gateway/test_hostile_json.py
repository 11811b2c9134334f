"""Bodies that nobody means: the replica judges them, and the gateway neither fails nor is held up by them."""

from __future__ import annotations

import pytest

from tests.gateway.scripted import gateway, playing, replica
from tests.gateway.test_failures import GOOD_WHOLE

DEEP = b"[" * 1000 + b"]" * 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":%b}]}' % DEEP),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"tools":%b}' % DEEP),
        ("/v1/completions", b'{"prompt":%b}' % DEEP),
        ("/v1/responses", b'{"input":%b}' % DEEP),
        ("/v1/messages", b'{"messages":%b}' % DEEP),
    ],
)
async def test_a_deeply_nested_body_reaches_the_replica_as_it_came(path: str, body: bytes) -> None:
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        answer = await g.post(path, body)
        assert (answer.status, a.seen[0].body) == (200, body)
        assert (g.in_flight, len(g.proxy.live)) == (0, 0)


async def test_the_length_of_a_prompt_of_too_many_parts_is_that_of_its_body() -> None:
    body = b'{"prompt":[%b]}' % b",".join([b"[1]"] * 50_000)
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        await g.post("/v1/completions", body)
        assert (await g.record()).prompt_bytes == len(body)
