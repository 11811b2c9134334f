"""A body that comes in several reads behind a head that is known: one request, whatever happens on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from gateway import wire
from gateway.coming import Coming
from gateway.door import Door
from gateway.request_head import learn
from gateway.sections import Limits
from tests.gateway.scripted import Connection, Gateway, Seen, gateway, replica, until
from tests.gateway.test_failures import whole
from tests.gateway.test_request_head import HEAD, request, scope

BODY = b'{"model":"tiny","prompt":"' + b"river " * 2_000 + b'"}'


async def echo(connection: Connection, seen: Seen) -> None:
    await connection.send(whole(b"200 OK", seen.body))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is."""
    monkeypatch.setattr(wire, "PATIENCE_S", 600.0)


@asynccontextmanager
async def acquainted() -> AsyncIterator[tuple[Gateway, Connection, list[Seen]]]:
    """A client whose head the gateway has seen once."""
    async with replica(echo) as a, gateway(a) as g:
        client = await g.connect()
        await client.send(request(b'{"model":"tiny","prompt":"a"}'))
        assert (await client.answer()).status == 200
        a.seen.clear()
        yield g, client, a.seen
        client.close()


def missing(g: Gateway) -> int | None:
    """Bytes of a body that is being collected; None: there is none."""
    found: Coming | None = g.protocols[0]._coming
    return None if found is None else found.missing


async def test_its_reads_are_one_request() -> None:
    async with acquainted() as (g, client, seen):
        data = request(BODY)
        await client.send(data[:5_000])
        await until(lambda: missing(g) == len(data) - 5_000)
        await client.send(data[5_000:9_000])
        await until(lambda: missing(g) == len(data) - 9_000)
        assert g.proxy.door.receiving_bytes == 9_000 - (len(data) - len(BODY))
        await client.send(data[9_000:])
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, BODY)
        assert [one.body for one in seen] == [BODY]
        assert missing(g) is None
        assert g.proxy.door.receiving_bytes == 0


async def test_one_that_stays_away_takes_the_ordinary_way_with_its_limits() -> None:
    async with acquainted() as (g, client, _):
        await client.send(request(BODY)[:5_000])
        await until(lambda: missing(g))
        g.protocols[0]._parse_coming()  # as its timer does
        assert missing(g) is None
        await client.send(request(BODY)[5_000:])
        assert (await client.answer()).body == BODY
        assert g.proxy.door.receiving_bytes == 0


async def test_what_follows_it_in_the_same_read_is_the_next_request() -> None:
    async with acquainted() as (g, client, seen):
        data = request(BODY)
        await client.send(data[:5_000])
        await until(lambda: missing(g))
        await client.send(data[5_000:] + request(b'{"model":"tiny","prompt":"b"}'))
        assert (await client.answer()).body == BODY
        assert (await client.answer()).body == b'{"model":"tiny","prompt":"b"}'
        assert [len(one.body) for one in seen] == [len(BODY), 29]


async def test_a_client_that_leaves_in_the_middle_is_on_record_and_holds_nothing() -> None:
    async with acquainted() as (g, client, seen):
        await g.record()
        await client.send(request(BODY)[:5_000])
        await until(lambda: missing(g))
        client.close()
        await until(lambda: len(g.records) == 2)
        assert (g.records[1].outcome, g.records[1].reason) == ("cancelled", "client_left")
        assert g.proxy.door.receiving_bytes == 0
        assert seen == []


async def test_what_the_gateway_has_no_room_for_is_refused_as_ever() -> None:
    async with acquainted() as (g, client, seen):
        await client.send(request(BODY)[:5_000])
        await until(lambda: missing(g))
        g.proxy.door.configure(Limits(receiving_bytes=65_536, max_body_bytes=65_536))
        g.proxy.door.receiving_bytes += 64_000  # of others
        await client.send(request(BODY)[5_000:-1])
        answer = await client.answer()
        assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (429, "queue_full")
        assert g.proxy.door.receiving_bytes == 64_000
        assert seen == []


def test_it_is_counted_while_it_comes() -> None:
    door = Door(Limits())
    known = learn(request(b"12345"), scope())
    assert known is not None
    body = Coming(known, door, request(b"12345")[:-3], len(HEAD) - 1, 3)
    assert door.receiving_bytes == 2
    assert body.add(b"34")
    assert (door.receiving_bytes, body.missing) == (4, 1)
    assert not body.add(b"5P")  # one byte more than it has
    body.close()
    assert door.receiving_bytes == 0
