"""A gateway that may open no more files: it refuses, says why, and blames no replica for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.files import no_more_files
from tests.scripted_replica import ScriptedReplica, chunk, event, scripted_replica
from tests.serving import PLAIN, chat, gateway, samples, streaming, wait_for

CHAT = "/v1/chat/completions"
QUICK = "[health]\nprobe_interval_s = 0.1\n[scrape]\ninterval_s = 0.1\n"


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


@pytest.fixture
def replica(go_on: threading.Event) -> Iterator[ScriptedReplica]:
    def script(body: dict[str, Any]) -> Iterator[bytes]:
        yield chunk({"role": "assistant", "content": ""})
        yield chunk({"content": "one"})
        if "wait" in json.dumps(body["messages"]):
            go_on.wait(60)
        yield chunk({"content": " two"}, "length")
        yield event("[DONE]")

    with scripted_replica({CHAT: script}) as made:
        yield made


def seen_in(page: str, name: str, **labels: str) -> float:
    return sum(v for n, given, v in samples(page) if n == name and labels.items() <= given.items())


def test_who_needs_a_socket_is_refused_and_the_replica_is_not_blamed(
    replica: ScriptedReplica, go_on: threading.Event, tmp_path: Path
) -> None:
    with gateway([replica.url], tmp_path, policy="round_robin", config=QUICK) as front:
        with httpx.Client(base_url=front.url, timeout=30, verify=PLAIN) as client:
            assert client.post(CHAT, json=chat("first")).status_code == 200
            with streaming(front.url, chat("wait")) as waiting:  # on the connection that the first one left
                wait_for(lambda: len(replica.seen) == 2, "it is there")
                with no_more_files(front.server.process.pid):
                    refused = client.post(CHAT, json=chat("second"))
                go_on.set()
                assert waiting.read().done
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert refused.json()["error"]["message"] == "the gateway itself is overloaded"
            assert int(refused.headers["retry-after"]) >= 1
            assert client.post(CHAT, json=chat("third")).status_code == 200
            page = client.get("/metrics").text
        assert seen_in(page, "forebay_ejections_total") == 0
        assert seen_in(page, "forebay_door_refusals_total", of="sockets") == 1
        assert front.server.log.read_text().count("may open no more files") == 1
