"""One gateway of two is cut off from Redis and from every replica, as by a network that drops its packets.

The other does not notice but for what it is told; the one that is cut off ends or finishes all it has, refuses or holds
what comes, and is back when the network is. The same with packets really dropped, between network namespaces, is
`python -m loadtests.bench partition`, which needs the rights to make them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.gateway.shared.pair import Server
from tests.serving import Gateway, begun, chat, gateway, metric, post, quiet, wait_for
from tests.simulated import simulated
from tests.valve import Valve, valve

CONFIG = """
[redis]
url = "redis://127.0.0.1:{port}/0"
call_s = {limit_s}
[journal]
path = "{journal}"
[scrape]
interval_s = 0.2
timeout_s = 2.0
[health]
probe_interval_s = 0.2
probe_timeout_s = {limit_s}
hang_s = {limit_s}
slow_start_s = 0.0
[classes.standard]
ttft_s = "none"
ttft_s_per_token = 0.0
tpot_s = "none"
"""
# The one that is cut off finds out by limits that pass; the whole one has none that a busy machine could miss.
CUT_S, WHOLE_S = 3.0, 60.0


@dataclass
class Pair:
    """`cut` reaches everything through valves, `whole` nothing."""

    whole: Gateway
    cut: Gateway
    valves: list[Valve]
    replicas: list[str]
    journals: list[Path]

    def attempts(self) -> int:
        """Of all requests in both journals: how often one was sent to a replica."""
        lines = [line for path in self.journals for line in path.read_bytes().splitlines()]
        return sum(len(json.loads(line)["attempts"]) for line in lines)

    def generated(self) -> float:
        """Answers that the replicas ran to their end."""
        ends = ("length", "stop")
        return sum(
            metric(url, "vllm:request_success_total", finished_reason=end) for url in self.replicas for end in ends
        )


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    redis = Server(tmp_path)
    redis.start()
    with ExitStack() as stack:
        stack.callback(redis.stop)
        fleet = stack.enter_context(simulated(tmp_path, 2))
        ports = [urlsplit(url).port or 0 for url in fleet.urls]
        valves = [stack.enter_context(valve(port)) for port in (redis.port, *ports)]
        behind = [f"http://127.0.0.1:{v.port}" for v in valves[1:]]
        journals = [tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"]
        beside = CONFIG.format(port=redis.port, limit_s=WHOLE_S, journal=journals[0])
        whole = stack.enter_context(gateway(fleet.urls, tmp_path, config=beside))
        through = CONFIG.format(port=valves[0].port, limit_s=CUT_S, journal=journals[1])
        cut = stack.enter_context(gateway(behind, tmp_path, config=through))
        for one in (whole, cut):
            wait_for(lambda one=one: one.metric("forebay_shared_peers") == 1, "they know each other")
        yield Pair(whole, cut, valves, fleet.urls, journals)


def one(front: Gateway, i: int) -> int:
    return post(front.url, chat(f"{i}: where is the sea", max_tokens=2)).status_code


def ended(front: Gateway) -> float:
    """Requests that have left a record."""
    return front.metric("forebay_requests_total")


def test_a_gateway_that_is_cut_off_loses_and_doubles_nothing_and_comes_back(pair: Pair) -> None:
    whole, cut = pair.whole, pair.cut
    before = {front.url: ended(front) for front in (whole, cut)}
    ran = pair.generated()
    with ExitStack() as stack, ThreadPoolExecutor(16) as pool:
        there, here = begun(stack, whole, 3, max_tokens=600), begun(stack, cut, 3, max_tokens=600)
        for v in pair.valves:
            v.shut()
        waiting: list[Future[int]] = [pool.submit(one, cut, i) for i in range(6)]
        wait_for(lambda: cut.metric("forebay_shared_up") == 0, "Redis is out of its reach")
        wait_for(lambda: cut.metric("forebay_replica_available") == 0, "and so is every replica")
        wait_for(lambda: whole.metric("forebay_shared_peers") == 0, "the other hears nothing of it any more")
        assert [one(whole, i) for i in range(6)] == [200] * 6, "which serves on"
        assert httpx.get(f"{cut.url}/health", timeout=30).status_code == 200
        assert httpx.get(f"{cut.url}/ready", timeout=30).status_code == 503, "so that load balancers go elsewhere"
        refused = one(cut, 99)
        for v in pair.valves:
            v.open()
        list(pool.map(lambda pair: list(pair[1]), [*there, *here]))
        statuses = [answer.result(timeout=120) for answer in waiting]
    assert [stream.done for stream, _ in there] == [True] * 3
    assert refused == 503
    assert set(statuses) <= {200, 429, 502, 503, 504}
    for stream, _ in here:
        assert stream.broken is None
        assert stream.done != (stream.error is not None), "an end or an error, and never both"
    for front in (whole, cut):
        wait_for(lambda front=front: front.metric("forebay_replica_available") == 2, "both replicas are in again")
        wait_for(lambda front=front: front.metric("forebay_shared_peers") == 1, "and the other gateway")
        wait_for(lambda front=front: quiet(front), "nothing is charged and nothing held")
        assert one(front, 7) == 200
    asked = {whole.url: 3 + 6 + 1, cut.url: 3 + 6 + 1 + 1}
    for front in (whole, cut):
        counted = asked[front.url]
        wait_for(lambda f=front, n=counted: ended(f) - before[f.url] >= n, "each request has left its record")
        assert ended(front) - before[front.url] == counted, "and one only"
    wait_for(lambda: sum(len(path.read_bytes().splitlines()) for path in pair.journals) == 21, "the journals are whole")
    answered = 3 + sum(stream.done for stream, _ in here) + 6 + statuses.count(200) + 2
    assert answered <= pair.generated() - ran <= pair.attempts(), "no answer was computed that nobody had asked for"
