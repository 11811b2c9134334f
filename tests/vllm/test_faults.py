"""A real replica dies, hangs or is asked to end: every request is answered whole or fails with a clear error.

`hang` stops the engine while `/health` stays 200. SIGTERM ends open streams with `finish_reason: "abort"`; with
`--shutdown-timeout` (drain) they finish, while every new request gets an empty answer with `abort` or a 500 at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.serving import Gateway, Stream, chat, gateway, post, stream, streaming, wait_for
from tests.vllm.replicas import Replicas

# `hang_s`: vLLM may keep the connection of a request that it will not answer any more, its port shut
QUICK = """
[health]
hang_s = 8.0
backoff_s = 1.0
slow_start_s = 0.0
"""
GIVES_UP = "[timeouts]\nidle_s = 15.0\n" + QUICK  # a stream that says nothing for so long; one that works says more
ENDLESS = 7000  # tokens: a stream that does not end by itself while a test looks


@pytest.fixture
def front(breakable: Replicas, tmp_path: Path) -> Iterator[Gateway]:
    with gateway(breakable.urls, tmp_path, policy="least_request", config=QUICK) as running:
        yield running


class OpenStreams:
    """Long streams over both replicas, read in threads from the third event on, until they end or the block does."""

    def __init__(self, front: Gateway, replicas: Replicas, count: int, tokens: int = ENDLESS) -> None:
        self.stack = ExitStack()
        self.over = threading.Event()
        self.opened: list[tuple[int, Stream]] = []
        self.pool = self.stack.enter_context(ThreadPoolExecutor(count))
        self.reading: list[tuple[int, Future[Stream]]] = []
        for n in range(count):
            opened = self.stack.enter_context(
                streaming(front.url, chat(f"stream {n}", max_tokens=tokens, ignore_eos=True))
            )
            events = iter(opened)
            for _ in range(3):
                next(events)
            self.opened.append((replicas.index(opened.replica), opened))
            self.reading.append((self.opened[-1][0], self.pool.submit(self._rest, opened, events)))

    def _rest(self, opened: Stream, events: Iterator[bytes]) -> Stream:
        for _ in events:
            if self.over.is_set():
                break
        return opened

    def __enter__(self) -> OpenStreams:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.stack.close()

    def go_on(self, replica: int) -> bool:
        """Waits until each stream of that replica has said more than now, or is whole; whether there is one."""
        so_far = [(opened, len(opened.body)) for i, opened in self.opened if i == replica]
        wait_for(
            lambda: all(len(opened.body) > n or whole(opened) for opened, n in so_far),
            f"streams of replica {replica} go on",
        )
        return bool(so_far)

    def ended(self, replica: int) -> list[Stream]:
        return [future.result(timeout=300) for i, future in self.reading if i == replica]


def truncated(answer: Stream) -> bool:
    """Cut off after it began, and said so: an error event last, and no [DONE]."""
    return answer.broken is None and answer.error is not None and not answer.done


def whole(answer: Stream) -> bool:
    return answer.broken is None and answer.error is None and answer.done and answer.finish == "length"


def told(answer: Stream) -> str:
    """`whole`, or what the client was told instead."""
    return "whole" if whole(answer) else f"{answer.response.status_code} {answer.error} {answer.finish} {answer.broken}"


def break_under_load(front: Gateway, replicas: Replicas, fault: Callable[[], None]) -> list[httpx.Response | Stream]:
    """Breaks a replica while requests, streamed and not, are under way and keep coming; all that they got."""
    with ThreadPoolExecutor(16) as pool:
        jobs: list[Future[httpx.Response | Stream]] = []

        def both_work() -> bool:
            if all(job.done() for job in jobs):  # also where so little time is given to us that we never saw them work
                for n in range(4):
                    jobs.append(pool.submit(post, front.url, chat(f"whole {n}", max_tokens=150)))
                    jobs.append(pool.submit(stream, front.url, chat(f"stream {n}", max_tokens=150)))
            return all(replicas.running(i) > 0 for i in range(2))

        wait_for(both_work, "both replicas work")
        fault()
        for n in range(4):
            jobs.append(pool.submit(post, front.url, chat(f"later {n}", max_tokens=20)))
            jobs.append(pool.submit(stream, front.url, chat(f"later stream {n}", max_tokens=20)))
        return [job.result(timeout=300) for job in jobs]


def honest(answer: httpx.Response | Stream) -> bool:
    """Whole, or a failure that says what it is."""
    if isinstance(answer, Stream):
        if answer.response.status_code != 200:
            return bool(answer.response.status_code >= 500)
        return whole(answer) or truncated(answer)
    if answer.status_code != 200:
        return answer.status_code >= 500 and bool(answer.json()["error"]["message"])
    return bool(answer.json()["choices"][0]["finish_reason"] == "length")


def test_a_killed_replica_cuts_only_its_streams_and_says_so(front: Gateway, breakable: Replicas) -> None:
    with OpenStreams(front, breakable, 6) as streams:
        breakable.script("kill", "0")
        cut = streams.ended(0)
        assert cut
        assert all(truncated(answer) for answer in cut)
        assert streams.go_on(1)
    for n in range(6):
        answer = stream(front.url, chat(f"after {n}"))
        assert whole(answer)
        assert breakable.index(answer.replica) == 1


def test_a_kill_under_load_loses_nothing_silently(front: Gateway, breakable: Replicas) -> None:
    answers = break_under_load(front, breakable, lambda: breakable.script("kill", "1"))
    assert all(honest(answer) for answer in answers)


def test_a_hung_engine_is_left_and_comes_back(breakable: Replicas, tmp_path: Path) -> None:
    with (
        gateway(breakable.urls, tmp_path, policy="least_request", config=GIVES_UP) as front,
        OpenStreams(front, breakable, 4) as streams,
    ):
        breakable.script("hang", "0")
        try:
            assert breakable.healthy(0)  # what a probe alone would see
            answers = [stream(front.url, chat(f"beside {n}")) for n in range(4)]
            assert all(whole(answer) for answer in answers)
            cut = streams.ended(0)
            assert cut
            assert all(truncated(answer) for answer in cut)
            assert streams.go_on(1)
            assert {breakable.index(stream(front.url, chat(f"out {n}")).replica) for n in range(6)} == {1}
        finally:
            breakable.script("resume", "0")
        wait_for(lambda: breakable.index(stream(front.url, chat("back")).replica) == 0, "replica 0 is used again")


def test_sigterm_without_drain_is_never_passed_on_as_success(front: Gateway, breakable: Replicas) -> None:
    with OpenStreams(front, breakable, 6) as streams:
        breakable.sigterm(0)
        cut = streams.ended(0)
        assert cut
        assert all(truncated(answer) for answer in cut)
        assert streams.go_on(1)
        assert whole(stream(front.url, chat("after")))


def test_sigterm_under_load_loses_nothing_silently(front: Gateway, breakable: Replicas) -> None:
    answers = break_under_load(front, breakable, lambda: breakable.sigterm(1))
    assert all(honest(answer) for answer in answers)
    wait_for(lambda: breakable.gone(1), "replica 1 has ended")


def generates(url: str) -> bool:
    """Whether a replica, asked itself, still takes new work."""
    answer = post(url, chat("still there?", max_tokens=1))
    return answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] != "abort"


def test_a_draining_replica_finishes_its_streams_and_swallows_nothing_new(breakable: Replicas, tmp_path: Path) -> None:
    """vLLM 0.32 answers new chats with 500 then, and prompts of token ids with `abort`: one gateway meets each."""
    breakable.script("stop", "0")
    breakable.start("--shutdown-timeout 600")
    tokens = {"model": "tiny", "prompt": [301, 302, 303], "max_tokens": 8}
    with (
        gateway(breakable.urls, tmp_path, policy="round_robin", config=QUICK) as chats,
        gateway(breakable.urls, tmp_path, policy="round_robin", config=QUICK) as ids,
        OpenStreams(chats, breakable, 4, tokens=600) as streams,
        OpenStreams(chats, breakable, 2) as held,  # so that it drains as long as we look
    ):
        breakable.sigterm(0)
        wait_for(lambda: not generates(breakable.urls[0]), "replica 0 takes nothing new")
        streamed = [stream(chats.url, chat(f"new {n}")) for n in range(6)]
        posted = [post(chats.url, chat(f"new whole {n}")) for n in range(4)]
        by_ids = [post(ids.url, tokens, "/v1/completions") for _ in range(4)]
        ejected = [front.metric("forebay_ejections_total", reason="abort") for front in (chats, ids)]
        finished = streams.ended(0) + streams.ended(1)
        assert held.go_on(0)
    assert [told(answer) for answer in streamed] == ["whole"] * 6
    assert {breakable.index(answer.replica) for answer in streamed} == {1}
    for answer in (*posted, *by_ids):
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert ejected == [1, 1]
    assert [told(answer) for answer in finished] == ["whole"] * 4
    wait_for(lambda: breakable.gone(0), "the drained replica has ended")
