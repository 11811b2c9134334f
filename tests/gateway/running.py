"""A whole gateway process in the test's own loop: composition root and server as `forebay serve` runs them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gateway.app import Gateway
from gateway.config import Config, load, merged
from gateway.server import Server, listen, url

QUICK: dict[str, Any] = {
    "listen": {"port": 0},
    "policy": {"name": "round_robin", "seed": 1},
    "health": {"probe_interval_s": 0.05, "backoff_s": 0.1, "backoff_max_s": 0.2, "hang_s": 0.3, "slow_start_s": 0.0},
    "scrape": {"interval_s": 0.05, "models_refresh_s": 0.1},
    # a busy machine must not make a gateway refuse what a test sends
    "limits": {"loop_lag_s": None},
    "classes": {"standard": {"ttft_s": None, "ttft_s_per_token": 0.0, "tpot_s": None}},
}


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for a condition; a test that needs a time would be a lie on a loaded machine."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@dataclass
class Running:
    gateway: Gateway
    server: Server
    url: str
    http: httpx.AsyncClient
    task: asyncio.Task[None]

    def terminate(self) -> None:
        """As SIGTERM does."""
        self.server.handle_exit(signal.SIGTERM, None)

    def phase(self, replica_id: str) -> str:
        return self.gateway.fleet.health.records[replica_id].phase.value

    def reason(self, replica_id: str) -> str:
        return self.gateway.fleet.health.records[replica_id].reason

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {
            "model": "sim",
            "messages": [{"role": "user", "content": "where is the river"}],
            "max_tokens": 4,
            **fields,
        }
        return await self.http.post("/v1/chat/completions", json=body)


@asynccontextmanager
async def running(
    *replicas: str,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    ready: bool = True,
    **tables: Any,
) -> AsyncIterator[Running]:
    """A gateway before the replicas of these URLs, named r0, r1, ...; `tables` are laid over quick settings."""
    rows: Sequence[dict[str, Any]] = [{"url": one, "id": f"r{i}"} for i, one in enumerate(replicas)]
    overrides = merged(QUICK, {**({"replicas": rows} if rows else {}), **tables})
    config: Config = load(file, overrides)
    gateway = Gateway(config, file, overrides, environ or {})
    server = Server(gateway)
    sock = listen(config)
    task = asyncio.create_task(server._serve([sock]))
    address = url(sock)
    async with httpx.AsyncClient(base_url=address, timeout=30.0, trust_env=False) as http:
        made = Running(gateway, server, address, http, task)
        try:
            await until(lambda: server.started)
            if ready:
                await until(lambda: all(gateway.fleet.available(r) for r in gateway.fleet.replicas))
            yield made
        finally:
            made.terminate()
            made.terminate()
            await task
