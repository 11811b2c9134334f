"""What the only replica answers last reaches the client, also where a core in another process decides about retries."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.serving import chat, gateway, post

MODELS = b'{"object":"list","data":[{"id":"tiny","object":"model"}]}'
BROKEN = b'{"error":{"message":"the proxy before the engine finds no engine"}}'


class Replica(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200, {"/v1/models": MODELS}.get(self.path, b""))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(502, BROKEN)

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Replica)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_502_of_the_only_replica_is_told_as_it_is(url: str, workers: int, tmp_path: Path) -> None:
    """Not as a 503 that says there is no replica: it is there, and said what is wrong."""
    with gateway([url], tmp_path, config=f"[workers]\ncount = {workers}\nanswer_s = 60.0\n") as front:
        answer = post(front.url, chat("where is the river"))
    assert (answer.status_code, answer.content) == (502, BROKEN)
