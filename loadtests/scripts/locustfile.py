"""Locust against a Forebay gateway: a quick look at errors and latency under many users. Not goodput.

    locust -f loadtests/scripts/locustfile.py --headless -u 20 -r 5 -t 60s --host http://127.0.0.1:8080

Locust is response-paced: each user sends its next request when the last answer has come, so a slow server gets less
load. It reports the time to the first content event as its own entry, "TTFT". For a rate that does not depend on the
server, patience, and a verdict on the generator itself: `forebay replay`.
Environment: FOREBAY_MODEL (default: the first model listed), FOREBAY_MAX_TOKENS (64), FOREBAY_API_KEY.
"""

from __future__ import annotations

import json
import os
import random
import time

from locust import HttpUser, between, task  # type: ignore[import-not-found,unused-ignore]

TOPICS = ("rivers", "bridges", "tides", "turbines", "locks", "weirs")
SYSTEM = "You answer questions about water engineering in one paragraph. " * 40  # a prefix that users share
MAX_TOKENS = int(os.environ.get("FOREBAY_MAX_TOKENS", "64"))


class ChatUser(HttpUser):  # type: ignore[misc,unused-ignore]
    wait_time = between(0.5, 2.0)
    model = os.environ.get("FOREBAY_MODEL", "")

    def on_start(self) -> None:
        key = os.environ.get("FOREBAY_API_KEY")
        if key:
            self.client.headers["Authorization"] = f"Bearer {key}"
        if not self.model:
            self.model = self.client.get("/v1/models").json()["data"][0]["id"]
        self.messages = [{"role": "system", "content": SYSTEM}]

    @task  # type: ignore[untyped-decorator,unused-ignore]
    def chat(self) -> None:
        """One turn of a conversation, streamed; the answer becomes part of the next prompt."""
        question = f"Tell me about {random.choice(TOPICS)} ({random.randrange(10**6)})."
        self.messages.append({"role": "user", "content": question})
        body = {"model": self.model, "messages": self.messages, "max_tokens": MAX_TOKENS, "stream": True}
        started = time.perf_counter()
        first: float | None = None
        text: list[str] = []
        done = False
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, catch_response=True, name="chat"
        ) as answer:
            if answer.status_code != 200:
                answer.failure(f"status {answer.status_code}: {answer.text[:120]}")
                self.messages.pop()
                return
            for line in answer.iter_lines():
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]":
                    done = True
                    break
                event = json.loads(line[6:])
                if "error" in event:
                    answer.failure(f"error in the stream: {event['error'].get('message', '')[:120]}")
                    return
                piece = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
                if piece and first is None:
                    first = time.perf_counter()
                text.append(piece)
            # with stream=True Locust stops its clock at the headers
            answer.request_meta["response_time"] = (time.perf_counter() - started) * 1e3
            if not done:
                answer.failure("the stream ended without [DONE]")
                return
        if first is not None:
            self.environment.events.request.fire(
                request_type="SSE", name="TTFT", response_time=(first - started) * 1e3, response_length=0,
                exception=None, context={},
            )  # fmt: skip
        self.messages.append({"role": "assistant", "content": "".join(text)})
        if len(self.messages) > 12:
            self.messages = self.messages[:1]
