"""The live page and prompt families of a gateway in several processes: one truth, whoever is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import PLAIN, Gateway, begun, chat, gateway, post, wait_for
from tests.simulated import Simulated

CONFIG = """
[workers]
count = 2
[scrape]
interval_s = 0.2
[health]
slow_start_s = 0.0
[prefixes]
cpu_share = 0.5
[classes.standard]
ttft_s = "none"
tpot_s = "none"
"""
SHARED = "\n".join(f"Rule {n}: be brief about the {n}th secretword and cite what you know." for n in range(60))
TOKEN = {"authorization": "Bearer s3cret"}


@pytest.fixture(scope="module")
def front(fleet: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    with gateway(fleet.urls, folder, config=CONFIG, env={"FOREBAY_ADMIN_TOKEN": "s3cret"}) as running:
        yield running


def asked(front: Gateway, path: str) -> Any:
    answer = httpx.get(front.url + path, headers=TOKEN, timeout=30, verify=PLAIN)
    assert answer.status_code == 200
    return answer.json()


def first_snapshot(front: Gateway) -> dict[str, Any]:
    with httpx.stream("GET", f"{front.url}/admin/live", headers=TOKEN, timeout=60, verify=PLAIN) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        kind = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: ") and kind == "snapshot":
                found: dict[str, Any] = json.loads(line[6:])
                return found
    raise AssertionError("the stream ended")


def test_families_are_found_over_all_processes(front: Gateway) -> None:
    for n in range(12):
        body = chat(f"question {n}")
        body["messages"].insert(0, {"role": "system", "content": f"It is 2026-06-03T10:{n:02}:30Z now.\n{SHARED}"})
        assert post(front.url, body).status_code == 200
    wait_for(lambda: asked(front, "/admin/prefixes")["samples"] >= 8, "eight prompts were looked into")
    report = asked(front, "/admin/prefixes")
    assert len(report["families"]) == 1
    (leak,) = report["leaks"]
    assert (leak["kind"], leak["path"], leak["offset"]) == ("timestamp", "messages[0].content", 6)
    assert "secretword" not in json.dumps(report)


def test_the_stream_comes_through_a_hand_with_what_others_refused(front: Gateway) -> None:
    assert post(front.url, chat("x" * 4000), **{"x-slo-ttft-ms": "1"}).status_code == 429
    now = wait_for(lambda: (seen := first_snapshot(front))["notable"] and seen, "the refusal is told")
    assert [replica["phase"] for replica in now["replicas"]] == ["in", "in"]
    assert now["notable"][0]["reason"] == "infeasible"
    assert len(now["notable"][0]["alternatives"]) == 2


def test_the_status_counts_what_is_open_in_every_process(front: Gateway) -> None:
    with ExitStack() as here:
        streams = begun(here, front, 3, max_tokens=30_000)
        wait_for(lambda: asked(front, "/admin/status")["open_requests"] == len(streams), "three are open")


def test_the_stream_needs_the_token_and_the_page_does_not(front: Gateway) -> None:
    assert httpx.get(f"{front.url}/admin/live", timeout=30, verify=PLAIN).status_code == 401
    assert "Forebay" in httpx.get(f"{front.url}/dashboard", timeout=30, verify=PLAIN).text
