"""Second by second: what is read, what a second holds, and what moves with the wait in queues."""

from __future__ import annotations

import pytest

from loadtests import watch
from loadtests.watch import Watch, correlation, second
from tests.loadtests.scripted import Call, scripted, until

REPLICA = """\
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} %g
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} %g
vllm:num_preemptions_total{engine="0",model_name="m"} %g
vllm:kv_cache_usage_perc{engine="0",model_name="m"} %g
"""
GATEWAY = """\
forebay_queue_wait_seconds_sum{service_class="interactive"} %g
forebay_queue_wait_seconds_count{service_class="interactive"} %g
forebay_queue_wait_seconds_bucket{le="0.1",service_class="interactive"} 3
forebay_replica_pacing_rate{replica="a"} 0.5
forebay_event_loop_lag_seconds 0.002
"""


def test_a_second_holds_the_wait_at_gateway_and_engine_and_what_was_beside_it() -> None:
    read = watch.engine_watch.read
    before = {"a": read(REPLICA % (10, 5, 0, 0.2)), "gateway": watch.of_gateway(GATEWAY % (1, 4))}
    now = {"a": read(REPLICA % (16, 8, 2, 0.9)), "gateway": watch.of_gateway(GATEWAY % (3, 8))}
    assert second(before, now, (100.0, 400.0), (250.0, 600.0)) == {
        "wait_s": 2.5, "preemptions": 2.0, "kv_usage": 0.9, "loop_lag_s": 0.002, "pacing_rate": 0.5, "host_busy": 0.75,
    }  # fmt: skip


def test_a_second_in_which_nobody_left_a_queue_has_no_wait_and_silence_is_not_zero() -> None:
    same = {"a": watch.engine_watch.read(REPLICA % (10, 5, 0, 0.2)), "gateway": watch.of_gateway(GATEWAY % (1, 4))}
    assert "wait_s" not in second(same, same)
    assert second(same, {}) == {}
    assert "wait_s" not in second({}, same), "what came before is not known"


@pytest.mark.parametrize(
    ("ys", "rho"),
    [
        ([1.0, 4.0, 9.0, 16.0], 1.0),  # together, by whatever curve
        ([5.0, 4.0, 3.0, -9.0], -1.0),
        ([1.0, 2.0, 2.0, 3.0], 0.9487),
        ([2.0, 4.0, 1.0, 3.0], 0.0),
        ([7.0, 7.0, 7.0, 7.0], None),
    ],
)
def test_ranks_are_compared(ys: list[float], rho: float | None) -> None:
    found = correlation([1.0, 2.0, 3.0, 4.0], ys)
    assert found == (None if rho is None else pytest.approx(rho, abs=1e-4))


def test_what_moves_with_the_wait_is_told_largest_first_and_only_of_ten_seconds_or_more() -> None:
    rows = [
        {
            "at_s": float(i),
            "wait_s": 0.1 * i,
            "kv_usage": 0.01 * i * i,
            "host_busy": 0.5,
            "preemptions": float(i % 3 == 0),
        }
        for i in range(12)
    ]
    told = watch.line([*rows, {"at_s": 99.0, "kv_usage": 0.0}])
    assert told == "the wait in queues moves with: KV usage +1.00, preemptions -0.20 (rank correlation over 12 s)"
    assert watch.line(rows[:9]) is None
    assert watch.line([]) is None


async def test_replicas_and_gateway_are_looked_at_until_the_end_and_no_thread_stays() -> None:
    looks = 0

    async def metrics(call: Call) -> None:
        nonlocal looks
        looks += 1
        body = (REPLICA % (2 * looks, looks, 0, 0.5) + GATEWAY % (looks, looks)).encode()
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async with scripted(metrics) as server:
        watching = Watch([f"{server.url}/v1"], server.url, every_s=0.005)
        watching.__enter__()
        await until(lambda: len(watching.rows) >= 3)
        watching._over.set()
        await until(lambda: not watching._thread.is_alive())
    assert {call.path for call in server.calls} == {"/metrics"}
    assert [row["wait_s"] for row in watching.rows[:3]] == [3.0, 3.0, 3.0]  # 2 s at the engine, 1 s at the gateway
    assert watching.totals["held_count"] >= 6


def test_who_does_not_answer_is_left_out() -> None:
    with Watch(["http://127.0.0.1:9"], "http://127.0.0.1:9", every_s=0.005) as watching:
        while not watching.rows:
            watching._over.wait(0.005)
    assert set(watching.rows[0]) <= {"at_s", "host_busy"}
    assert watching.totals == {}
