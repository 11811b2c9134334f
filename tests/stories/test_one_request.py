"""Stories against scripted replicas: what a client, a user error or a reload may and may not change."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.scripted_replica import Answer, ScriptedReplica, chunk, event, scripted_replica
from tests.serving import CHAT, Gateway, chat, gateway, post, stream, streaming, wait_for

USAGE = {"prompt_tokens": 17, "completion_tokens": 2, "total_tokens": 19}


class Held:
    """A replica whose streams say one word and wait until the test lets go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.gone = threading.Semaphore(0)  # released by each stream that ended, whole or not
        self.open = 0

    def script(self, body: dict[str, Any]) -> Answer | Iterator[bytes]:
        if body.get("temperature", 0) < 0:
            return Answer(
                {"error": {"message": "temperature", "type": "BadRequestError", "param": None, "code": 400}}, 400
            )
        if not body.get("stream"):
            message = {"role": "assistant", "content": "the bank"}
            return Answer(
                {"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": USAGE}
            )
        return self.events()

    def events(self) -> Iterator[bytes]:
        self.open += 1
        try:
            yield chunk({"role": "assistant", "content": ""})
            yield chunk({"content": "the"})
            while not self.go_on.wait(0.02):
                yield b": waiting\n\n"  # a comment, so that a closed connection is noticed
            yield chunk({"content": " bank"}, "stop")
            yield event("[DONE]")
        finally:
            self.gone.release()


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.go_on.set()


@pytest.fixture
def replicas(held: Held) -> Iterator[list[ScriptedReplica]]:
    with ExitStack() as stack:
        yield [stack.enter_context(scripted_replica({CHAT: held.script})) for _ in range(4)]


@pytest.fixture
def front(replicas: list[ScriptedReplica], tmp_path: Path) -> Iterator[Gateway]:
    with gateway([r.url for r in replicas], tmp_path, policy="least_request") as running:
        yield running


def idle(front: Gateway) -> bool:
    """Every counter of work is back at zero."""
    names = (
        "forebay_replica_in_flight",
        "forebay_replica_prefill_backlog_tokens",
        "forebay_open_requests",
        "forebay_held_bytes",
    )
    return all(front.metric(name) == 0 for name in names)


def test_a_burst_at_one_instant_spreads(front: Gateway, held: Held) -> None:
    """Load counts at the decision: 32 arrivals before any answer go 8 to each of 4 replicas."""
    with ThreadPoolExecutor(32) as pool:
        jobs = [pool.submit(stream, front.url, chat(f"burst {n}")) for n in range(32)]
        wait_for(lambda: held.open == 32, "all streams are open")
        held.go_on.set()
        answers = [job.result(timeout=120) for job in jobs]
    assert sorted(Counter(a.replica for a in answers).values()) == [8, 8, 8, 8]
    wait_for(lambda: idle(front), "all counters at zero")


def test_a_client_that_leaves_closes_the_replicas_stream(front: Gateway, held: Held) -> None:
    with streaming(front.url, chat("leave")) as opened:
        events = iter(opened)
        next(events)
    assert held.gone.acquire(timeout=120)
    assert not held.go_on.is_set()
    wait_for(lambda: idle(front), "all counters at zero")
    assert wait_for(lambda: front.metric("forebay_requests_total", outcome="cancelled"), "recorded as cancelled") == 1


def test_user_errors_never_eject_a_replica(replicas: list[ScriptedReplica], tmp_path: Path) -> None:
    with gateway([r.url for r in replicas], tmp_path, policy="round_robin") as front:
        for n in range(40):
            assert post(front.url, chat(f"wrong {n}", temperature=-1)).status_code == 400
        assert [len(r.seen) for r in replicas] == [10] * 4  # and none was tried twice
        assert front.metric("forebay_ejections_total") == 0
        assert front.metric("forebay_replica_available") == 4
        chosen = [post(front.url, chat(f"right {n}")).headers["x-forebay-replica"] for n in range(8)]
    assert Counter(chosen) == {r.url.removeprefix("http://"): 2 for r in replicas}


def reload(front: Gateway, change: Callable[[], None]) -> None:
    """SIGHUP after `change`, and waits until the new configuration is in force."""
    before = front.metric("forebay_config_version")
    change()
    front.server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: front.metric("forebay_config_version") > before, "the new configuration")


def test_a_reload_keeps_open_streams(replicas: list[ScriptedReplica], held: Held, tmp_path: Path) -> None:
    with gateway([r.url for r in replicas], tmp_path, config="[timeouts]\nidle_s = 60.0\n") as front:
        with streaming(front.url, chat("stay")) as opened:
            events = iter(opened)
            next(events)
            (file,) = tmp_path.glob("*.toml")
            reload(front, lambda: file.write_text("[timeouts]\nidle_s = 61.0\n") and None)
            held.go_on.set()
            for _ in events:
                pass
        assert opened.text == "the bank"
        assert opened.done


def test_a_mistake_in_a_reload_changes_nothing(replicas: list[ScriptedReplica], tmp_path: Path) -> None:
    with gateway([r.url for r in replicas], tmp_path) as front:
        (file,) = tmp_path.glob("*.toml")
        file.write_text("[timeouts]\nidel_s = 61.0\n")
        front.server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "idel_s" in front.server.log.read_text(), "the mistake is named in the log")
        assert post(front.url, chat("still here")).status_code == 200


def test_sigterm_finishes_streams_and_takes_nothing_new(front: Gateway, held: Held) -> None:
    with streaming(front.url, chat("stay")) as opened:
        events = iter(opened)
        next(events)
        front.server.process.send_signal(signal.SIGTERM)

        def refused() -> bool:
            try:
                return post(front.url, chat("new")).status_code == 503
            except httpx.TransportError:
                return True

        wait_for(refused, "new requests are refused")
        held.go_on.set()
        for _ in events:
            pass
    assert opened.done
    assert wait_for(lambda: front.server.process.poll() is not None, "the gateway ends")
    assert front.server.process.returncode == 0


def test_the_body_arrives_as_it_was_sent(replicas: list[ScriptedReplica], tmp_path: Path) -> None:
    """Unknown fields, order and spacing survive; only what was asked for is spliced in."""
    body = b'{"model" :"tiny", "x_unknown": {"b":1,"a":[ 2 ]},"messages":[{"role":"user","content":"\\u00e9"}]}'
    with gateway([replicas[0].url], tmp_path) as front:
        answer = httpx.post(front.url + CHAT, content=body, headers={"content-type": "application/json"}, timeout=30)
    assert answer.status_code == 200
    (seen,) = [s for s in replicas[0].seen if s.path == CHAT]
    assert seen.body == body


def test_an_error_event_before_any_content_becomes_a_true_status(tmp_path: Path) -> None:
    """A replica at its queue limit answers 200 and an error event; the next replica is tried, nobody is ejected."""
    error = event({"error": {"message": "queue is full", "type": "Service Unavailable", "param": None, "code": 503}})
    full, free = [error, event("[DONE]")], [chunk({"role": "assistant", "content": "yes"}, "stop"), event("[DONE]")]
    with (
        scripted_replica({CHAT: lambda body: full}) as first,
        scripted_replica({CHAT: lambda body: free}) as second,
        gateway([first.url, second.url], tmp_path, policy="round_robin") as front,
    ):
        answers = [stream(front.url, chat(f"n {n}")) for n in range(4)]
        assert [a.text for a in answers] == ["yes"] * 4
        assert front.metric("forebay_ejections_total") == 0
    with scripted_replica({CHAT: lambda body: full}) as only, gateway([only.url], tmp_path) as front:
        alone = stream(front.url, chat("n"))
    assert alone.response.status_code == 503
    assert json.loads(bytes(alone.body))["error"]["message"] == "queue is full"


def test_times_stand_in_the_answer(front: Gateway) -> None:
    sent_at = time.time()
    answer = post(front.url, chat("timing"), **{"x-request-id": "river-1"})
    assert answer.headers["x-request-id"] == "river-1"
    assert answer.headers["x-forebay-reason"]
    assert 0 <= float(answer.headers["x-forebay-queue-ms"]) <= (time.time() - sent_at) * 1000
    assert "server-timing" in answer.headers
