"""A gateway that may open no more files: it refuses, says why, and blames no replica for it."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx

from tests.files import no_more_files
from tests.scripted_replica import ScriptedReplica
from tests.serving import CHAT, PLAIN, chat, gateway, metric, streaming, wait_for

QUICK = "[health]\nprobe_interval_s = 0.1\n[scrape]\ninterval_s = 0.1\n"


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
        assert metric(front.url, "forebay_ejections_total") == 0
        assert metric(front.url, "forebay_door_refusals_total", of="sockets") == 1
        assert front.server.log.read_text().count("may open no more files") == 1
