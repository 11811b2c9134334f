"""The gateway refuses when it is itself what is short: of time on its loop, or of memory for bodies."""

from __future__ import annotations

import orjson
import pytest

from gateway.door import Door
from gateway.lag import LoopLag
from gateway.sections import Limits
from tests.gateway.running import running
from tests.gateway.scripted import Answer, gateway, playing, replica, until
from tests.gateway.test_failures import GOOD_WHOLE, WHOLE

KINDS = pytest.mark.parametrize("spliced", [True, False], ids=["spliced", "asgi"])


def code(answer: Answer) -> tuple[int, str]:
    return answer.status, orjson.loads(answer.body)["error"]["code"]


# -- the loop ------------------------------------------------------------------------------------------------------


def test_the_door_shuts_above_the_bound_and_opens_below_half_of_it() -> None:
    door = Door(Limits(loop_lag_s=0.2))
    states = []
    for mean_s in (0.1, 0.2, 0.21, 0.15, 0.11, 0.1, 0.15, 0.2):
        door.lagged(mean_s)
        states.append(door.shedding)
    assert states == [False, False, True, True, True, False, False, False]


def test_one_long_block_is_no_overload_and_a_lasting_one_is() -> None:
    door = Door(Limits(loop_lag_s=0.25))
    lag = LoopLag(door.lagged)
    lag.late(2.0)  # 0.2 s in the mean
    assert not door.shedding
    for _ in range(8):
        lag.late(0.4)  # 10 x 100 ms and more of it: the mean goes to 0.4
    assert door.shedding
    while door.shedding:
        lag.late(0.0)
    assert round(lag.mean_s, 2) == 0.12


def test_retry_after_is_when_the_lag_will_have_fallen() -> None:
    door = Door(Limits(loop_lag_s=0.25))
    for mean_s, wait_s in ((0.26, 1.0), (2.5, 3.0), (25.0, 5.3)):
        door.lagged(mean_s)
        assert round(door.late().retry_after_s or 0.0, 1) == wait_s
    assert door.refused["loop_lag"] == 3


def test_none_switches_it_off_also_while_it_sheds() -> None:
    door = Door(Limits(loop_lag_s=0.25))
    door.lagged(9.0)
    assert door.shedding
    door.configure(Limits(loop_lag_s=None))
    assert not door.shedding


async def test_while_the_loop_lags_sheddable_requests_are_refused_and_others_served() -> None:
    settings = "[classes.vital]\nsheddable = false\n"
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a, settings=settings) as g:
        g.proxy.door.lagged(0.3)
        refused = await g.post("/v1/completions", WHOLE)
        assert code(refused) == (429, "queue_full")
        assert refused.header("retry-after") is not None
        assert refused.header("x-should-retry") is None  # a retry may succeed
        record = await g.record()
        assert (record.outcome, record.partition, record.reason) == ("shed", "rejected", "queue_full")
        assert (await g.post("/v1/completions", WHOLE, "x-service-class: vital\r\n")).status == 200
        g.proxy.door.lagged(0.1)
        assert (await g.post("/v1/completions", WHOLE)).status == 200
        assert len(a.seen) == 2


async def test_the_running_loop_tells_the_door_and_metrics_tell_the_operator() -> None:
    async with running(limits={"loop_lag_s": 0.25}) as g:
        for _ in range(30):
            g.gateway.lag.late(1.0)
        assert g.gateway.proxy.door.shedding
        page = (await g.http.get("/metrics")).text
        assert "\nforebay_overloaded 1.0\n" in page
        assert '\nforebay_door_refusals_total{of="loop_lag"} 0.0\n' in page
        await until(lambda: not g.gateway.proxy.door.shedding)  # the loop is idle: it opens by itself


# -- bodies --------------------------------------------------------------------------------------------------------

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 3000\r\n\r\n" + b" " * 1500


async def test_bodies_on_their_way_share_one_bound() -> None:
    settings = "limits.max_body_bytes = 4000\nlimits.receiving_bytes = 4000"
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a, settings=settings) as g:
        slow = [await g.connect() for _ in range(2)]
        for client in slow:
            await client.send(HALF)
        await until(lambda: g.proxy.door.receiving_bytes == 3000)
        third = await g.connect()
        await third.send(HALF)
        refused = await third.answer()
        assert code(refused) == (429, "queue_full")
        assert refused.header("retry-after") in ("1", "2")
        assert g.proxy.door.refused["receiving"] == 1
        await until(lambda: g.proxy.door.receiving_bytes == 3000)  # the two go on
        slow[0].close()  # one leaves
        await until(lambda: g.proxy.door.receiving_bytes == 1500)
        await slow[1].send(WHOLE.ljust(1500))
        assert (await slow[1].answer()).status == 200
        assert g.proxy.door.receiving_bytes == 0
        for client in (*slow, third):
            client.close()


async def test_a_body_that_comes_whole_needs_no_room_at_the_door() -> None:
    settings = "limits.max_body_bytes = 100\nlimits.receiving_bytes = 100"
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a, settings=settings) as g:
        g.proxy.door.receiving_bytes = 100  # others
        assert (await g.post("/v1/completions", WHOLE)).status == 200


@KINDS
async def test_a_body_that_never_comes_gives_its_room_back(spliced: bool) -> None:
    settings = "limits.body_timeout_s = 0.2"
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a, settings=settings, spliced=spliced) as g:
        client = await g.connect()
        await client.send(HALF)
        assert code(await client.answer()) == (408, "body_too_slow")
        assert g.proxy.door.receiving_bytes == 0
        client.close()
