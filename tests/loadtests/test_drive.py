"""The driver against a scripted server: what becomes of rows that go well, late, wrong, or never."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from loadtests.client import Client, Target
from loadtests.drive import Behaviour, Clock, Driver
from loadtests.ports import free_ports
from loadtests.record import ERRORS
from loadtests.retry import OFFICIAL
from loadtests.schedule import Schedule
from policies.model import ServiceClass
from policies.objectives import Partition
from tests.loadtests.driven import LOOSE, build, by_hand, drive, row
from tests.loadtests.scripted import HEAD, LAST, Call, full_answer, piece, scripted, until, usage


async def test_every_row_is_sent_and_good() -> None:
    records, driver, calls = await drive(full_answer, [row(i, 0.01 * i) for i in range(20)])
    assert [r.partition for r in records] == [Partition.GOOD] * 20
    assert sorted(c.json["id"] for c in calls) == list(range(20))  # type: ignore[type-var]
    assert all(r.completion_tokens == 3 and r.attempts == 1 and r.replica == "r0" for r in records)
    assert (driver.sustained.due, driver.sustained.dispatched) == (20, 20)


async def test_times_count_from_the_schedule_not_from_the_send() -> None:
    """A row whose time passed before the run could send it is late by that much."""
    schedule = Schedule((row(0, 0.0),), 1.0, 20.0, 512, {"interactive": LOOSE})
    async with scripted(full_answer) as server:
        clock = Clock(time.perf_counter() - 0.5)
        (record,) = await Driver(schedule, build, Client(Target.parse(server.url), clock.now), clock).run()
    assert record.lag_s is not None
    assert record.lag_s >= 0.5
    assert record.ttft_s is not None
    assert record.ttft_s >= record.lag_s


async def test_a_late_first_token_is_slow_and_complete() -> None:
    strict = ServiceClass("interactive", ttft_s=1e-6, ttft_s_per_token=0.0)
    records, _, _ = await drive(full_answer, [row(0, 0.0)], service_class=strict)
    assert (records[0].partition, records[0].complete) == (Partition.SLOW_TTFT, True)


async def test_shed_rows_stay_in_the_denominator() -> None:
    async def script(call: Call) -> None:
        if call.number % 2:
            await call.plain(429, {"error": {"code": "infeasible", "message": "m", "type": "t"}})
        else:
            await full_answer(call)

    records, _, _ = await drive(script, [row(i, 0.02 * i) for i in range(6)])
    assert sorted(r.partition for r in records) == [Partition.GOOD] * 3 + [Partition.REJECTED] * 3
    assert all(r.counted for r in records)
    assert {r.reason for r in records} == {"", "infeasible"}


async def test_what_is_open_at_the_end_of_the_drain_is_unfinished() -> None:
    async def stall(call: Call) -> None:
        if call.json["id"] == 1:
            await call.send(HEAD)
            await call.event(piece("a"))
        else:
            await full_answer(call)

    rows = [row(0, 0.0), row(1, 0.0)]
    async with by_hand(stall, rows, window_s=0.25, drain_s=0.25) as (clock, client, running, _):
        clock.advance(0.0)
        await until(lambda: (client.begun(), client.ended()) == (2, 1))
        clock.advance(0.49)
        await asyncio.sleep(0)
        assert not running.done()
        clock.advance(0.5)
        records = await running
    assert [r.partition for r in records] == [Partition.GOOD, Partition.UNFINISHED]
    assert (records[0].end_s, records[1].first_s, records[1].end_s) == (0.0, 0.0, None)


async def test_warm_up_and_cool_down_rows_are_sent_and_not_counted() -> None:
    cool_down_came = asyncio.Event()

    async def script(call: Call) -> None:
        if call.json["id"] == 2:
            cool_down_came.set()
        elif call.json["id"] == 1:
            await cool_down_came.wait()  # with its last counted answer the run ends
        await full_answer(call)

    rows = [row(0, -0.5), row(1, 0.02), row(2, 0.5)]
    async with by_hand(script, rows, window_s=0.1) as (clock, _, running, server):
        for sent, at_s in enumerate((-0.5, 0.02, 0.5), 1):
            clock.advance(at_s)
            await until(lambda sent=sent: len(server.calls) == sent)
        records = await running
    assert [call.json["id"] for call in server.calls] == [0, 1, 2]
    assert [r.counted for r in records] == [False, True, False]
    assert [r.dispatched_s for r in records] == [-0.5, 0.02, 0.5]


async def test_a_later_turn_waits_for_the_answer_and_the_think_time() -> None:
    session = [row(0, 0.0, session="s"), row(1, None, session="s", turn=1, think_s=0.05)]
    records, _, calls = await drive(full_answer, session)
    assert [c.json["turn"] for c in calls] == [0, 1]
    assert records[0].end_s is not None
    assert records[1].scheduled_s == records[0].end_s + 0.05
    assert [r.partition for r in records] == [Partition.GOOD] * 2


async def test_turns_behind_a_failed_one_are_failures_too() -> None:
    async def script(call: Call) -> None:
        await call.plain(500, {"error": {"message": "m", "type": "t", "code": 500}})

    session = [row(0, 0.0, session="s"), *(row(i, None, session="s", turn=i) for i in (1, 2))]
    records, _, calls = await drive(script, session)
    assert [r.partition for r in records] == [Partition.ERROR_HTTP, *[Partition.NOT_DISPATCHED] * 2]
    assert [r.reason for r in records] == ["t", *["behind a failed turn: t"] * 2]
    assert records[0].message == "m"
    assert all(r.counted for r in records)
    assert len(calls) == 1


@pytest.mark.parametrize("concurrency", [None, 1])
async def test_the_live_count_of_errors_is_that_of_the_table(concurrency: int | None) -> None:
    """One error and one turn behind it; the turn was never sent, so it is no error, and says why."""

    async def script(call: Call) -> None:
        await call.plain(403, {"error": {"message": "m", "type": "t", "code": "class_not_allowed"}})

    session = [row(0, 0.0, session="s"), row(1, None, session="s", turn=1)]
    records, driver, _ = await drive(script, session, behaviour=Behaviour(concurrency=concurrency), window_s=60.0)
    assert driver.tally.errors == sum(r.partition in ERRORS for r in records) == 1
    assert [r.reason for r in records] == ["class_not_allowed", "behind a failed turn: class_not_allowed"]


async def test_a_turn_that_did_not_become_due_says_so() -> None:
    later = [row(0, 0.0, session="s"), row(1, None, session="s", turn=1, think_s=1000.0)]
    async with by_hand(full_answer, later) as (clock, client, running, _):
        clock.advance(0.0)
        await until(lambda: client.ended() == 1)
        clock.advance(30.0)
        records = await running
    assert records[1].partition is Partition.NOT_DISPATCHED
    assert records[1].reason == "not reached by the end of the run"


async def test_a_cut_stream_is_truncated_and_not_retried() -> None:
    async def script(call: Call) -> None:
        await call.send(HEAD)
        await call.event(piece("a"))
        call.writer.close()

    records, _, calls = await drive(script, [row(0, 0.0)], behaviour=Behaviour(retries=OFFICIAL))
    assert (records[0].partition, records[0].attempts, len(calls)) == (Partition.TRUNCATED, 1, 1)
    assert records[0].reason.startswith("connection_cut")


async def test_a_server_that_is_not_there_is_a_transport_error() -> None:
    schedule = Schedule((row(0, 0.0),), 1.0, 5.0, 512, {"interactive": LOOSE})
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    clock = Clock(time.perf_counter())
    (record,) = await Driver(schedule, build, Client(Target.parse(url), clock.now), clock).run()
    assert record.partition is Partition.ERROR_TRANSPORT
    assert record.reason.startswith("no_response")


async def test_official_clients_retry_and_the_request_still_counts_once() -> None:
    async def script(call: Call) -> None:
        if call.number == 0:
            await call.plain(429, {"error": {"code": "queue_full", "message": "m"}}, "retry-after-ms: 1")
        else:
            await full_answer(call)

    records, _, calls = await drive(script, [row(0, 0.0)], behaviour=Behaviour(retries=OFFICIAL))
    assert (records[0].partition, records[0].attempts) == (Partition.GOOD, 2)
    assert [c.headers["x-request-id"] for c in calls] == ["t-0", "t-0-2"]


async def test_should_retry_false_is_obeyed() -> None:
    async def script(call: Call) -> None:
        await call.plain(429, {"error": {"code": "infeasible", "message": "m"}}, "x-should-retry: false")

    records, _, calls = await drive(script, [row(0, 0.0)], behaviour=Behaviour(retries=OFFICIAL))
    assert (records[0].partition, len(calls)) == (Partition.REJECTED, 1)


async def test_a_client_hangs_up_at_its_deadline_and_the_server_sees_it() -> None:
    async def script(call: Call) -> None:
        await call.send(HEAD)
        await call.event(piece("a"))

    deadline = ServiceClass("interactive", ttft_s=9.0, e2e_s=10.0)
    async with by_hand(script, [row(0, 0.5)], service_class=deadline) as (clock, client, running, server):
        clock.advance(0.6)
        await until(lambda: client.begun() == 1)
        clock.advance(10.4)
        await asyncio.sleep(0)
        assert server.hung_up == 0
        clock.advance(10.5)  # counted from its scheduled time, not from when it was sent
        (record,) = await running
        await until(lambda: server.hung_up == 1)
    assert (record.partition, record.reason) == (Partition.ABANDONED, "at the deadline")
    assert record.end_s == 10.5


async def test_an_impatient_client_leaves_before_the_first_token() -> None:
    patience_s = random.Random("0/0").lognormvariate(0.0, 0.5)

    async def script(call: Call) -> None:
        await call.send(HEAD)

    async with by_hand(script, [row(0, 0.0)], behaviour=Behaviour(patience_s=1.0)) as (clock, _, running, server):
        clock.advance(0.0)
        await until(lambda: len(server.calls) == 1)
        clock.advance(patience_s - 0.01)
        await asyncio.sleep(0)
        assert server.hung_up == 0
        clock.advance(patience_s)
        (record,) = await running
        await until(lambda: server.hung_up == 1)
    assert (record.partition, record.reason) == (Partition.ABANDONED, "before the first token")


async def test_patience_ends_with_the_first_token() -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(HEAD)
        await call.event(piece("a"))
        await release.wait()
        await call.event(piece("b"), piece("c", "length"), usage(4, 3), b"data: [DONE]\n\n")
        await call.send(LAST)

    async with by_hand(script, [row(0, 0.0)], behaviour=Behaviour(patience_s=1.0)) as (clock, client, running, _):
        clock.advance(0.0)
        await until(lambda: client.begun() == 1)
        clock.advance(15.0)
        await asyncio.sleep(0)
        release.set()
        (record,) = await running
    assert record.partition is Partition.GOOD
    assert record.longest_gap_s == 15.0


async def test_response_paced_keeps_so_many_in_flight() -> None:
    now, most = 0, 0

    async def script(call: Call) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        await full_answer(call)
        now -= 1

    records, _, calls = await drive(
        script, [row(i, 0.0) for i in range(30)], behaviour=Behaviour(concurrency=3), window_s=20.0
    )
    assert most <= 3
    assert len(calls) == 30
    assert sum(r.counted for r in records) == 30


async def test_a_straggler_does_not_change_what_the_rate_is_divided_by() -> None:
    """Window and drain are fixed; the run ends at their end, not at the last answer."""

    async def script(call: Call) -> None:
        if call.json["id"] == 3:
            await call.send(HEAD)
        else:
            await full_answer(call)

    rows = [row(i, 0.0) for i in range(4)]
    async with by_hand(script, rows, window_s=0.25, drain_s=0.25) as (clock, client, running, server):
        clock.advance(0.0)
        await until(lambda: (client.ended(), len(server.calls)) == (3, 4))
        clock.advance(0.49)
        await asyncio.sleep(0)
        assert not running.done()
        clock.advance(0.5)
        records = await running
    assert [r.partition for r in records] == [*[Partition.GOOD] * 3, Partition.UNFINISHED]


async def test_the_clock_of_scaled_replicas_runs_as_fast_as_they_do() -> None:
    schedule = Schedule((row(0, 5.0),), 10.0, 10.0, 512, {"interactive": LOOSE})
    async with scripted(full_answer) as server:
        clock = Clock(time.perf_counter(), scale=50.0)
        (record,) = await Driver(schedule, build, Client(Target.parse(server.url), clock.now), clock).run()
    assert record.scheduled_s == 5.0
    assert record.dispatched_s is not None
    assert record.dispatched_s >= 5.0
