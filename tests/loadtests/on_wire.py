"""A small fleet of simulated replicas that runs quickly, and bytes to and from it as a socket sees them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson

from loadtests.profiles import Profile
from loadtests.replica import EngineConfig, ReplicaSettings

CAPTURES = Path(__file__).resolve().parent.parent / "captures"
# a millisecond a step: streams last as long as they have tokens
QUICK = Profile("quick", 0.001, 0.0, 1e-6, 0.0, 0.0, num_blocks=2001, block_size=16)
# a gateway that refuses nothing because this machine is busy
PATIENT: dict[str, Any] = {
    "limits": {"loop_lag_s": None},
    "classes": {
        name: {"ttft_s": None, "ttft_s_per_token": 0.0, "tpot_s": None} for name in ("interactive", "standard")
    },
}
SETTINGS = ReplicaSettings(EngineConfig(QUICK, max_model_len=8192), model="tiny")


async def raw(url: str, path: str, body: dict[str, Any], more: str = "") -> bytes:
    """All bytes of one answer, as a socket sees them."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = orjson.dumps(body)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
        + data
    )
    answer = await reader.read()
    writer.close()
    return answer


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  the condition is plain state of the replica, it has no event
            await asyncio.sleep(0.001)


async def start_stream(url: str, tokens: int = 5000) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
    data = orjson.dumps({"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True})
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
    await reader.readuntil(b'"text"')
    return reader, writer
