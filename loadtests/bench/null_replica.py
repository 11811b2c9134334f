"""The null replica without a C compiler: the same arguments, the same answers, slower. See null_replica.c."""

from __future__ import annotations

import asyncio
import json
import sys
import time

ENVELOPE = '"id":"chatcmpl-a0a37310abb798fd","object":"chat.completion.chunk","created":1795969060,"model":"null"'
CONTENT_TYPES = {"/metrics": "text/plain; version=1.0.0; charset=utf-8"}
MODELS = b'{"object":"list","data":[{"id":"null","object":"model","owned_by":"vllm","max_model_len":1048576}]}'
FILLER = "".join(
    f'vllm:filler_{h}_seconds_bucket{{engine="0",le="{b}.0",model_name="null"}} {h * b}.0\n'
    for h in range(18)
    for b in range(36)
)


class Totals:
    running = 0
    prompts = 0
    generated = 0


def chunk(event: str) -> bytes:
    return f"{len(event):x}\r\n{event}\r\n".encode()


def choice(delta: str, finish: str = "null") -> str:
    rest = f'"delta":{{{delta}}},"logprobs":null,"finish_reason":{finish}'
    return f'data: {{{ENVELOPE},"choices":[{{"index":0,{rest}}}]}}\n\n'


ROLE = chunk(choice('"role":"assistant","content":""'))
TEXT = chunk(choice('"content":" river"'))
LAST = chunk(choice('"content":" bank"', '"length"'))


def metrics() -> bytes:
    t = Totals
    rows = {
        "num_requests_running": t.running,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0.01,
        "prompt_tokens_total": t.prompts * 17,
        "generation_tokens_total": t.generated,
        "iteration_tokens_total_count": t.generated,
    }
    text = "".join(f'vllm:{name}{{engine="0",model_name="null"}} {value}\n' for name, value in rows.items())
    return (text + FILLER).encode()


def answer(body: bytes, content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Replica(asyncio.Protocol):
    """One connection: requests one after the other, each answered whole or as a stream."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.received = bytearray()
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
            Totals.running -= 1

    def data_received(self, data: bytes) -> None:
        self.received += data
        while self.timer is None:
            head, found, _ = bytes(self.received).partition(b"\r\n\r\n")
            if not found:
                return
            fields = head.lower().split(b"\r\n")
            length = next((int(f.split(b":")[1]) for f in fields if f.startswith(b"content-length:")), 0)
            total = len(head) + 4 + length
            if len(self.received) < total:
                return
            body = bytes(self.received[len(head) + 4 : total])
            del self.received[:total]
            self.serve(head.split(b" ", 2)[1].decode(), body)

    def serve(self, path: str, body: bytes) -> None:
        if not body:
            known = {"/metrics": metrics(), "/v1/models": MODELS, "/version": b'{"version":"0.32.0"}'}
            self.transport.write(answer(known.get(path, b""), CONTENT_TYPES.get(path, "application/json")))
            return
        asked = json.loads(body)
        Totals.prompts += 1
        tokens = asked.get("max_tokens", 16)
        prompt = len(body) // 4 + 1
        usage = (
            f'"usage":{{"prompt_tokens":{prompt},"total_tokens":{prompt + tokens},"completion_tokens":{tokens},'
            f'"prompt_tokens_details":{{"cached_tokens":{(prompt - 1) // 16 * 16}}}}}'
        )
        if not asked.get("stream"):
            message = '"message":{"role":"assistant","content":" river bank"}'
            text = f'"choices":[{{"index":0,{message},"finish_reason":"length"}}]'
            self.transport.write(answer(f"{{{ENVELOPE.replace('.chunk', '')},{text},{usage}}}".encode()))
            return
        head = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        self.transport.write(head + b"transfer-encoding: chunked\r\n\r\n")
        wants_usage = (asked.get("stream_options") or {}).get("include_usage")
        tail = chunk(f'data: {{{ENVELOPE},"choices":[],{usage}}}\n\n') if wants_usage else b""
        Totals.running += 1
        self.later(time.monotonic(), tokens, tokens, tail)

    def later(self, at: float, left: int, tokens: int, tail: bytes) -> None:
        due = at + self.interval_s
        delay_s = max(0.0, due - time.monotonic())
        self.timer = asyncio.get_running_loop().call_later(delay_s, self.event, due, left, tokens, tail)

    def event(self, due: float, left: int, tokens: int, tail: bytes) -> None:
        first = ROLE if left == tokens else b""
        Totals.generated += 1
        if left > 1:
            self.transport.write(first + TEXT)
            self.later(due, left - 1, tokens, tail)
            return
        self.transport.write(first + LAST + tail + chunk("data: [DONE]\n\n") + b"0\r\n\r\n")
        self.timer = None
        Totals.running -= 1
        self.data_received(b"")


async def main(interval_us: int, ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda: Replica(interval_us / 1e6), "127.0.0.1", p, backlog=4096) for p in ports
    ]
    print("ready", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
