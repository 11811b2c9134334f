"""A response lives in the replica that made it: what refers to it goes there, or is told why it cannot."""

from __future__ import annotations

import orjson

from tests.gateway.scripted import Answer, Connection, Gateway, Script, Seen, gateway, replica
from tests.gateway.test_failures import whole


def maker(name: bytes) -> Script:
    """Answers each request with a response whose id says who made it."""

    async def script(connection: Connection, request: Seen) -> None:
        await connection.send(whole(b"200 OK", b'{"id":"resp_%b","status":"completed","by":"%b"}' % (name, name)))

    return script


async def respond(g: Gateway, previous: str | None = None, model: str = "tiny") -> Answer:
    body = {"model": model, "input": "where is the river"}
    return await g.post("/v1/responses", orjson.dumps(body | ({"previous_response_id": previous} if previous else {})))


async def get(g: Gateway, path: str) -> Answer:
    client = await g.connect()
    await client.send(f"GET {path} HTTP/1.1\r\nHost: g\r\n\r\n".encode())
    answer = await client.answer()
    client.close()
    return answer


def error(answer: Answer) -> tuple[int, str, str]:
    told = orjson.loads(answer.body)["error"]
    return answer.status, told["code"], told["param"]


async def test_a_conversation_stays_where_its_responses_are() -> None:
    async with replica(maker(b"a")) as a, replica(maker(b"b")) as b, gateway(a, b) as g:
        assert [orjson.loads((await respond(g)).body)["by"] for _ in range(2)] == ["a", "b"]
        assert [orjson.loads((await respond(g, "resp_b")).body)["by"] for _ in range(4)] == ["b"] * 4
        assert [orjson.loads((await respond(g, "resp_a")).body)["by"] for _ in range(4)] == ["a"] * 4


async def test_an_id_nobody_made_is_404_where_several_could_have_it() -> None:
    async with replica(maker(b"a")) as a, replica(maker(b"b")) as b, gateway(a, b) as g:
        assert error(await respond(g, "resp_x")) == (404, "unknown_response", "previous_response_id")
        assert error(await get(g, "/v1/responses/resp_x")) == (404, "unknown_response", "response_id")
        assert error(await g.post("/v1/responses/resp_x/cancel", b"")) == (404, "unknown_response", "response_id")
        assert a.seen == b.seen == []


async def test_with_one_replica_it_answers_for_itself() -> None:
    """As after a restart of the gateway: nobody else can have made it."""
    async with replica(maker(b"a")) as a, gateway(a) as g:
        assert (await respond(g, "resp_x")).status == 200
        assert (await get(g, "/v1/responses/resp_x")).status == 200


async def test_when_its_replica_is_out_it_waits_and_when_it_is_gone_it_is_404() -> None:
    async with replica(maker(b"a")) as a, replica(maker(b"b")) as b, gateway(a, b) as g:
        await respond(g)
        g.fleet.drain("r0")
        refused = await respond(g, "resp_a")
        assert error(refused)[:2] == (503, "no_replica")
        assert refused.header("retry-after") is not None
        assert (await get(g, "/v1/responses/resp_a")).status == 200  # what it holds may still be read
        g.fleet.remove("r0")
        assert error(await respond(g, "resp_a")) == (404, "unknown_response", "previous_response_id")
        assert error(await get(g, "/v1/responses/resp_a")) == (404, "unknown_response", "response_id")
        assert b.seen == []


async def test_a_model_that_its_replica_does_not_serve_is_refused() -> None:
    async with replica(maker(b"a")) as a, replica(maker(b"b")) as b, gateway(a, b) as g:
        await respond(g)
        g.fleet.replicas["r1"].fixed_models = ()
        g.fleet.learn("r1", [{"id": "tiny"}, {"id": "other"}])
        assert (await respond(g, model="other")).header("x-forebay-replica") == "r1"
        assert error(await respond(g, "resp_a", "other")) == (400, "malformed", "previous_response_id")


async def test_an_adapter_goes_only_where_it_is_and_its_going_is_noticed() -> None:
    rows = [{"id": "tiny"}, {"id": "sql", "parent": "tiny"}]
    async with replica(maker(b"a")) as a, replica(maker(b"b")) as b, gateway(a, b) as g:
        assert error(await respond(g, model="sql"))[:2] == (404, "unknown_model")
        g.fleet.learn("r1", rows)
        assert [orjson.loads((await respond(g, model="sql")).body)["by"] for _ in range(4)] == ["b"] * 4
        g.fleet.drain("r1")
        assert error(await respond(g, model="sql"))[:2] == (503, "no_replica")
        g.fleet.learn("r1", rows[:1])  # unloaded
        assert error(await respond(g, model="sql"))[:2] == (404, "unknown_model")
