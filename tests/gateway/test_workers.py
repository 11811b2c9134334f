"""Stories of a gateway in several processes: hands and the core die, hang, are replaced, and nobody else notices."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.tenants import digest
from tests.serving import (
    CHAT,
    PLAIN,
    Gateway,
    Stream,
    begun,
    chat,
    comes_to,
    gateway,
    post,
    quiet,
    samples,
    seen,
    told,
    wait_for,
)
from tests.simulated import Simulated

QUICK = f"""
[workers]
count = 2
[scrape]
interval_s = 0.2
[health]
probe_interval_s = 0.2
slow_start_s = 0.0
[listen]
drain_s = 120.0
[tenants.small]
keys_sha256 = ["{digest("sk-small").hex()}"]
request_burst = 3
requests_per_s = 0.001
[tenants.big]
keys_sha256 = ["{digest("sk-big").hex()}"]
"""
BIG = {"authorization": "Bearer sk-big"}
SMALL = {"authorization": "Bearer sk-small"}
OVER = "this key is over its rate of requests: 0.001 requests per second, 3 at once; wait as long as Retry-After says"


@pytest.fixture(scope="module")
def front(fleet: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(fleet.urls, tmp_path_factory.mktemp("gateway"), config=QUICK) as running:
        wait_for(lambda: len(hands_of(running)) == 2, "and both hands")
        yield running


def children(front: Gateway) -> list[int]:
    return [pid for pid in front.server.tree()[1:] if alive(pid)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes(front: Gateway) -> dict[str, Any]:
    known: dict[str, Any] = told(f"{front.url}/admin/workers").json()
    return known


def core_of(front: Gateway) -> int:
    pid: int = processes(front)["core"]["pid"]
    return pid


def hands_of(front: Gateway) -> list[int]:
    return [row["pid"] for row in processes(front)["hands"]]


def carried(front: Gateway) -> dict[int, int]:
    """Open requests by hand."""
    return {row["pid"]: row["open_at_core"] for row in processes(front)["hands"]}


def finish(streams: list[tuple[Stream, Iterator[bytes]]]) -> list[Stream]:
    with ThreadPoolExecutor(len(streams)) as pool:
        list(pool.map(lambda pair: list(pair[1]), streams))
    return [opened for opened, _ in streams]


def read_until(over: threading.Event, events: Iterator[bytes]) -> None:
    for _ in events:
        if over.is_set():
            return


def answers(front: Gateway, headers: dict[str, str] = BIG) -> httpx.Response:
    return post(front.url, chat("where is the sea", max_tokens=2), **headers)


def answer_s(front: Gateway, seconds: float) -> None:
    """How long a hand waits for the core before it counts as hanging; as a rule far longer than a busy one needs."""

    def told_so() -> bool:
        patch = {"workers": {"answer_s": seconds}}
        return httpx.patch(f"{front.url}/admin/config", json=patch, timeout=60, verify=PLAIN).status_code == 200

    wait_for(told_so, "hands and core know it")


@contextmanager
def standing_still(front: Gateway, core: int) -> Iterator[None]:
    """The core stands still, and hands are quick to notice."""
    answer_s(front, 1.0)
    os.kill(core, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(core, signal.SIGCONT)
        answer_s(front, 60.0)


def test_both_hands_serve_and_the_core_counts_for_the_whole_host(front: Gateway) -> None:
    before = front.metric("forebay_requests_total", outcome="success")
    for _ in range(12):
        assert answers(front).status_code == 200
    comes_to(before + 12, lambda: front.metric("forebay_requests_total", outcome="success"), "all are counted")
    assert len(hands_of(front)) == 2
    assert httpx.get(f"{front.url}/v1/models", headers=BIG, timeout=60, verify=PLAIN).json()["data"][0]["id"] == "tiny"
    wait_for(lambda: quiet(front), "nothing is left")


def test_ps_tells_the_core_from_the_hands(front: Gateway) -> None:
    names = sorted(Path(f"/proc/{pid}/comm").read_text().strip() for pid in [core_of(front), *hands_of(front)])
    assert names == ["forebay-core", "forebay-hand-0", "forebay-hand-1"]


def test_quotas_hold_for_the_host_and_not_for_each_hand(front: Gateway) -> None:
    told = [answers(front, SMALL) for _ in range(9)]
    assert sorted(one.status_code for one in told) == [200] * 3 + [429] * 6
    assert {one.json()["error"]["message"] for one in told if one.status_code == 429} == {OVER}


def test_a_change_through_one_hand_is_true_for_all(front: Gateway) -> None:
    replica = httpx.get(f"{front.url}/admin/fleet", timeout=60, verify=PLAIN).json()[0]["id"]
    assert httpx.post(f"{front.url}/admin/drain/{replica}", timeout=60, verify=PLAIN).status_code == 200
    served = {answers(front).headers["x-forebay-replica"] for _ in range(10)}
    assert served
    assert replica not in served
    httpx.post(f"{front.url}/admin/drain/{replica}?draining=false", timeout=60, verify=PLAIN)
    patch = {"stream": {"commit_after_s": 11.0}}
    changed = httpx.patch(f"{front.url}/admin/config", json=patch, timeout=60, verify=PLAIN)
    assert changed.json()["changed"] == ["stream.commit_after_s: 15.0 -> 11.0"]


def test_a_killed_hand_takes_only_its_own_streams_with_it(front: Gateway) -> None:
    lost = front.metric("forebay_requests_total", reason="worker_lost")
    over = threading.Event()
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        stack.callback(over.set)
        streams = begun(stack, front, 8, max_tokens=20_000, **BIG)  # none of them ends by itself meanwhile
        wait_for(lambda: sum(carried(front).values()) == 8, "those before have ended")
        held = carried(front)
        victim = max(held, key=held.__getitem__)
        os.kill(victim, signal.SIGKILL)
        reading = [pool.submit(read_until, over, events) for _, events in streams]
        wait_for(lambda: [one.done() for one in reading].count(True) == held[victim], "its own streams end")
        goes_on = [one for one, job in zip(streams, reading, strict=True) if not job.done()]
        seen_so_far = [len(opened.body) for opened, _ in goes_on]
        wait_for(
            lambda: all(len(o.body) > n for (o, _), n in zip(goes_on, seen_so_far, strict=True)), "the others go on"
        )
        assert [opened.broken is not None for opened, _ in streams] == [job.done() for job in reading]
        over.set()
        assert not any(opened.done or opened.error for opened, _ in streams)
    gone = lost + held[victim]
    comes_to(gone, lambda: front.metric("forebay_requests_total", reason="worker_lost"), "they are counted")
    wait_for(lambda: len(set(hands_of(front))) == 2, "another hand is there")
    wait_for(lambda: quiet(front), "their charges are given back")
    assert all(answers(front).status_code == 200 for _ in range(8))


def test_a_killed_core_costs_no_stream_and_its_ledger_is_rebuilt(front: Gateway) -> None:
    core = core_of(front)
    patch = {"stream": {"commit_after_s": 12.0}}
    changed = httpx.patch(f"{front.url}/admin/config", json=patch, timeout=60, verify=PLAIN)
    assert changed.status_code == 200
    with ExitStack() as stack:
        streams = begun(stack, front, 6, max_tokens=20_000, **BIG)
        os.kill(core, signal.SIGKILL)
        meanwhile = [answers(front).status_code for _ in range(5)]
        assert meanwhile == [200] * 5
        comes_to(6, lambda: seen(front, "forebay_replica_in_flight"), "the new core knows what is open")
        for _, events in streams:
            assert all(b"choices" in event for event in islice(events, 3)), "they go on"
    assert core_of(front) != core
    wait_for(lambda: quiet(front), "nothing is left")
    config = httpx.get(f"{front.url}/admin/config", timeout=60, verify=PLAIN).json()
    assert config["stream"]["commit_after_s"] == 12.0, "what was changed by hand outlives the core"


def speeds(front: Gateway) -> dict[str, float]:
    """Prefill tokens/s of each replica as the core believes; empty while no core answers."""
    answer = httpx.get(f"{front.url}/metrics", timeout=30, verify=PLAIN)
    rows = samples(answer.text) if answer.status_code == 200 else ()
    return {
        labels["replica"]: v for name, labels, v in rows if name == "forebay_replica_prefill_rate_tokens_per_second"
    }


def test_a_core_that_follows_goes_on_with_the_speeds_that_the_one_before_had_learnt(front: Gateway) -> None:
    with ExitStack() as stack:
        served = {stream.replica for stream in finish(begun(stack, front, 4, max_tokens=8, **BIG))}
    wait_for(lambda: quiet(front), "nothing is left to learn from")
    known, since = speeds(front), time.monotonic()

    def taught() -> bool:
        asked_at = time.monotonic()  # before the core says how long ago it was
        return (processes(front)["core"]["taught_s_ago"] or 1e9) < asked_at - since

    wait_for(taught, "the hands were told since")
    core = core_of(front)
    os.kill(core, signal.SIGKILL)
    wait_for(lambda: speeds(front), "another core answers")
    assert core_of(front) != core
    after = speeds(front)
    assert {name: after[name] for name in served} == {name: known[name] for name in served}
    assert 8000.0 not in after.values(), "what is believed where nothing is known; the others start from the fleet's"


def test_a_core_that_hangs_counts_as_dead_until_it_moves_again(front: Gateway) -> None:
    core, before = core_of(front), front.metric("forebay_requests_total", outcome="success")
    with ExitStack() as stack:
        streams = begun(stack, front, 4, **BIG)
        with standing_still(front, core):
            alone = [answers(front) for _ in range(6)]
        assert [one.status_code for one in alone] == [200] * 6
        assert "fallback" in {one.headers["x-forebay-reason"] for one in alone}
        ended = finish(streams)
    assert [one.done for one in ended] == [True] * 4
    asked: list[httpx.Response] = []

    def decided() -> bool:
        asked.append(answers(front))
        return asked[-1].headers["x-forebay-reason"] != "fallback"

    wait_for(decided, "the core decides again")
    wait_for(lambda: quiet(front), "nothing is charged twice or left")
    whole = before + 10 + len(asked)
    comes_to(whole, lambda: front.metric("forebay_requests_total", outcome="success"), "both hands told theirs")


def test_what_ends_while_the_core_hangs_is_counted_once_it_moves_again(front: Gateway) -> None:
    """Prompts so long that what a hand tells of them fills what the kernel keeps: ends of streams stand behind them."""
    core, before = core_of(front), front.metric("forebay_requests_total", outcome="success")
    long = chat("the river takes it to the sea again and " * 3000, max_tokens=1)
    with ExitStack() as stack, ThreadPoolExecutor(60) as pool:
        streams = begun(stack, front, 4, max_tokens=40, **BIG)
        with standing_still(front, core):
            asked = [pool.submit(post, front.url, long, **BIG) for _ in range(60)]
            assert [one.done for one in finish(streams)] == [True] * 4
            assert [one.result().status_code for one in asked] == [200] * 60
    comes_to(before + 64, lambda: front.metric("forebay_requests_total", outcome="success"), "each is counted, once")
    wait_for(lambda: quiet(front), "nothing is charged twice or left")


def test_the_program_is_replaced_without_a_request_that_fails(front: Gateway) -> None:
    before = set(children(front))
    failures: list[object] = []
    over = threading.Event()

    def client() -> None:
        with httpx.Client(base_url=front.url, headers=BIG, timeout=60, verify=PLAIN) as http:
            while not over.is_set():
                try:
                    answer = http.post(CHAT, json=chat("and back as rain", max_tokens=2))
                    if answer.status_code != 200:
                        failures.append(answer.text)
                except httpx.HTTPError as error:
                    failures.append(error)

    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        streams = begun(stack, front, 4, **BIG)
        for _ in range(3):
            pool.submit(client)
        os.kill(front.server.process.pid, signal.SIGUSR2)
        try:
            wait_for(lambda: before.isdisjoint(children(front)), "all processes are new")
        finally:
            over.set()
        ended = finish(streams)
    assert failures == []
    assert [one.done for one in ended] == [True] * 4
    wait_for(lambda: quiet(front), "nothing is left")
    log = front.server.log
    wait_for(lambda: "INFO forebay.supervisor: replaced: " in log.read_text(), "the log says when it was done")


def test_no_two_hands_make_the_same_request_id(front: Gateway) -> None:
    """Nor does the one that comes for a hand that died: replicas and the journal know requests by it."""

    def made() -> list[str]:
        return [answers(front).headers["x-request-id"] for _ in range(12)]  # each on a connection of its own

    seen_so_far = made()
    before = hands_of(front)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in before), "both hands are dead")
    wait_for(lambda: len(hands_of(front)) == 2 and not set(hands_of(front)) & set(before), "both hands are new")
    ids = [*seen_so_far, *made()]
    assert sorted(set(ids)) == sorted(ids)


def test_sigterm_drains_every_hand(front: Gateway) -> None:
    with ExitStack() as stack:
        streams = begun(stack, front, 4, **BIG)
        for pid in hands_of(front):
            os.kill(pid, signal.SIGINT)  # Ctrl-C reaches the whole group, and is no second signal
        os.kill(front.server.process.pid, signal.SIGTERM)
        ended = finish(streams)
    assert [one.done for one in ended] == [True] * 4
    assert wait_for(lambda: front.server.process.poll() is not None, "it ends")
    assert front.server.process.returncode == 0
    assert front.server.log.read_text().count("stopping: ") == 1


def test_requests_that_were_held_are_answered_though_the_core_dies(fleet: Simulated, tmp_path: Path) -> None:
    """More prefill than the replicas may have at once waits in the core's queue; it dies, and nobody waits for ever."""
    with gateway(fleet.urls, tmp_path, config=QUICK) as front:
        for i in range(2):
            fleet.order(i, "hang")  # what waits goes on waiting until the core is dead
        try:
            held_and_answered(front, fleet)
        finally:
            for i in range(2):
                fleet.order(i, "clear")


def held_and_answered(front: Gateway, fleet: Simulated) -> None:
    text = "the sea gives it back as rain and the river takes it to the sea again " * 700
    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(lambda i=i: post(front.url, chat(f"{i} {text}", max_tokens=1), **BIG)) for i in range(24)]
        wait_for(lambda: seen(front, "forebay_held_requests"), "some are held")
        os.kill(core_of(front), signal.SIGKILL)
        for i in range(2):
            fleet.order(i, "clear")
        statuses = sorted(one.result(timeout=100).status_code for one in asked)
    assert set(statuses) <= {200, 429}
    assert 200 in statuses
    wait_for(lambda: quiet(front), "nothing is left")
