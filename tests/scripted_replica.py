"""A replica that plays a script: vLLM's fixed answers for probes, and for each path what the test says.

A script gets the request's JSON and returns an `Answer`, or an iterable of event bytes: each is sent as one HTTP
chunk, as vLLM does. `CUT` in place of an event closes the connection there, as a killed server does.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

CAPTURES = Path(__file__).parent / "captures"
CUT = b""
MODELS = {
    "object": "list",
    "data": [
        {"id": "tiny", "object": "model", "owned_by": "vllm", "root": "tiny", "parent": None, "max_model_len": 8192}
    ],
}
METRICS = """\
vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0
vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} 0.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="10000"} 1.0
"""


@dataclass
class Answer:
    """An answer that is not a stream."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


Script = Callable[[dict[str, Any]], Answer | Iterable[bytes]]


@dataclass
class Seen:
    """A request as it arrived."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class ScriptedReplica:
    url: str
    scripts: dict[str, Script]
    seen: list[Seen] = field(default_factory=list)


def event(payload: Any, name: str | None = None) -> bytes:
    """One SSE event; `[DONE]` is written bare."""
    data = payload if isinstance(payload, str) else json.dumps(payload)
    return (f"event: {name}\n" if name else "").encode() + f"data: {data}\n\n".encode()


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1795969060, "model": "tiny"}
    return event({**head, "choices": [choice]})


def captured(file: str, heading: str = "") -> list[bytes]:
    """The events of a recorded stream: the first exchange after the line that holds `heading`."""
    text = (CAPTURES / file).read_text()
    text = text[text.index(heading) :]
    body = b""
    for line in text.splitlines():
        if line.startswith("+") and "ms b" in line:
            body += ast.literal_eval(line.partition("ms ")[2])
            if body.endswith(b"\r\n0\r\n\r\n"):
                break
    chunks, rest = [], body.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        chunks.append(rest[:length])
        rest = rest[length + 2 :]
    return [c for c in chunks if c]


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    replica: ScriptedReplica

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.whole(Answer(MODELS))
        elif self.path == "/metrics":
            self.plain(METRICS.encode(), "text/plain; version=1.0.0; charset=utf-8")
        else:
            self.plain(b"", "text/plain")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.replica.seen.append(Seen(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        script = self.replica.scripts.get(self.path)
        if script is None:
            self.whole(Answer({"detail": "Not Found"}, 404))
            return
        made = script(json.loads(body))
        if isinstance(made, Answer):
            self.whole(made)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for one in made:
            if one == CUT:
                self.close_connection = True
                return
            self.wfile.write(b"%x\r\n%b\r\n" % (len(one), one))
        self.wfile.write(b"0\r\n\r\n")

    def whole(self, answer: Answer) -> None:
        self.plain(json.dumps(answer.body).encode(), "application/json", answer.status, answer.headers)

    def plain(self, body: bytes, kind: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "content-type": kind, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # of connects not yet taken: a sixth of one burst would wait a second for its next try


@contextmanager
def scripted_replica(scripts: dict[str, Script]) -> Iterator[ScriptedReplica]:
    replica = ScriptedReplica("", scripts)
    connection = type("Connection", (_Connection,), {"replica": replica})
    server = _Server(("127.0.0.1", 0), connection)
    replica.url = f"http://127.0.0.1:{server.server_address[1]}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield replica
    finally:
        server.shutdown()
        server.server_close()
