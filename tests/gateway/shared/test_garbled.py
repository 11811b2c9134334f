"""What no gateway of ours would write into Redis, read by one: it does not count, and nobody waits because of it."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import orjson
import pytest

from gateway.config import parse
from gateway.scheduler import Scheduler
from gateway.shared.changes import Changes
from gateway.shared.lookups import Lookups
from gateway.shared.prefix_index import PrefixIndex
from gateway.shared.registers import Registers
from gateway.shared.store import Store
from gateway.shared.table import RedisTable
from policies import registry
from policies.core import Balancer
from policies.model import Added
from policies.settings import Settings

GOOD: dict[str, Any] = {
    "load": {"a": [3, 500.0, 900.0, 2, 1, -0.01, 4.0, 0.5]}, "served": {"tiny\nstandard": 2.0}, "demand": 0.5,
    "open": {"acme": 2},
}  # fmt: skip
GARBLED: dict[str, bytes] = {
    "not JSON": b"\xff{",
    "a list": b"[]",
    "null": b"null",
    "nothing in it": b"{}",
    "words for numbers": orjson.dumps(GOOD | {"load": {"a": ["3", 1, 1, 1, 1, None, 1, 1]}}),
    "half a row": orjson.dumps(GOOD | {"load": {"a": [3]}}),
    "less than nothing": orjson.dumps(GOOD | {"load": {"a": [-3, 1, 1, 1, 1, None, 1, 1]}}),
    "more than there is": orjson.dumps(GOOD | {"demand": 1e300}),
    "yes for a number": orjson.dumps(GOOD | {"open": {"acme": True}}),
    "a list a thousand deep": orjson.dumps(GOOD | {"demand": 7}).replace(b":7", b":" + b"[" * 900 + b"]" * 900),
    "prices of another kind": orjson.dumps(GOOD | {"prices": {"numbers": 5}}),
}


def store() -> Store:
    """Of a Redis that nobody calls."""
    return Store(RedisTable(url="redis://127.0.0.1:1"), {})


def registers() -> tuple[Registers, Balancer]:
    rng = random.Random(0)
    balancer = Balancer(parse("").service_classes(), registry.make("round_robin"), Settings(), rng)
    scheduler = Scheduler(balancer)
    scheduler.fleet_event(Added("a", models=frozenset({"tiny"})))
    return Registers(store(), "me", scheduler), balancer


@pytest.mark.parametrize("what", GARBLED)
def test_a_register_that_cannot_be_read_is_told_of_once_and_takes_no_other_with_it(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    made, balancer = registers()
    for _ in range(3):
        made.heard([b"bad\xff", GARBLED[what], b"good", orjson.dumps(GOOD)])
    assert (list(made.peers), dict(made.tenants_open)) == (["good"], {"acme": 2})
    there = balancer.fleet.replicas["a"].peers
    assert there is not None
    assert there.in_flight == 3
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert warned[0].startswith("what gateway bad\ufffd says of itself cannot be read and does not count: ")


def test_a_gateway_that_starts_anew_under_its_name_has_sent_nothing_since() -> None:
    made, balancer = registers()
    for spent_s in (4.0, 1.0):
        made.heard([b"good", orjson.dumps(GOOD | {"load": {"a": [3, 500.0, 900.0, 2, 1, None, spent_s, 0.5]}})])
    there = balancer.fleet.replicas["a"].peers
    assert there is not None
    assert there.spent_s == 0.0


@pytest.mark.parametrize(
    "value", [b"", b"|||", b"@", b"a@+", b"a@x+%b" % (b"9" * 5000), b"\xff\x00@1", b"a", b"a@1|" * 10_000]
)
def test_holders_of_a_prompt_that_cannot_be_read_are_nobody(value: bytes) -> None:
    index = PrefixIndex(store(), lambda _: None, lambda: 0.0)
    found = index.found([value], 1)
    assert all(chunks == 1 for chunks in found.values())


def test_changes_that_cannot_be_read_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    changes = Changes(store(), "me")
    changes.heard([[]])
    rows = [b"\xff", b"[]", b"5", b'{"by":"other"}', b'{"by":"other","kind":"patch","tables":5}']
    changes.heard([[(b"%d-0" % number, {b"change": row}) for number, row in enumerate(rows, 1)] + [(b"6-0", {})]])
    assert changes.commands()[0][2] == "(6-0"
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 6


async def test_a_request_that_fails_when_redis_answers_leaves_no_other_waiting() -> None:
    class Answering(Store):
        async def call(self, name: str, commands: Any, probe: bool = False) -> list[Any] | None:
            return [[b"1"] * (len(commands[0]) - 1)]

    there = Answering(RedisTable(url="redis://127.0.0.1:1", lookup_s=60.0), {})
    there.up = True
    lookups, heard = Lookups(there), asyncio.Event()

    def fails(values: Any, answer: Any) -> None:
        raise KeyError("a fault of ours")

    lookups.ask(["one"], None, fails)
    lookups.ask(["two"], None, lambda values, answer: heard.set())
    async with asyncio.timeout(60):
        await heard.wait()
    await lookups.close()
