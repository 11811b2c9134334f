"""A replica whose streams stand still until the test lets them go on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.scripted_replica import ScriptedReplica, chunk, event, scripted_replica
from tests.serving import CHAT


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """Streams of the replica stand still after their first token until it is set."""
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
        yield event({"id": "c", "object": "chat.completion.chunk", "model": "tiny", "choices": [],
                     "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}})  # fmt: skip
        yield event("[DONE]")

    with scripted_replica({CHAT: script}) as made:
        yield made
