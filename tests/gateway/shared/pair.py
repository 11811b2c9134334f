"""Two gateways and the Redis that they share."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis import Redis

from gateway.tenants import digest
from loadtests.bench.processes import ENDS_WITH_US
from loadtests.ports import free_ports
from loadtests.replica import Fleet, ReplicaSettings
from tests.gateway.running import Running, running, until
from tests.serving import wait_for

TENANT = {
    "small": {"keys_sha256": [digest("sk-small").hex()], "request_burst": 4, "requests_per_s": 0.001},
    "narrow": {"keys_sha256": [digest("sk-narrow").hex()], "concurrency": 1},
    "big": {"keys_sha256": [digest("sk-big").hex()]},
}


class Server:
    """A redis-server on a port of its own that can be stopped, paused and started again."""

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self.client: Any = Redis(port=self.port, socket_timeout=10)

    def start(self) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        assert program is not None, "these tests need redis-server or valkey-server"
        argv = [
            *ENDS_WITH_US,
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(self.folder),
        ]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        wait_for(self.answers, "redis-server answers")

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except Exception:
            return False

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def listeners(self) -> int:
        """Gateways that hear it when another rings."""
        ((_, count),) = self.client.pubsub_numsub("{forebay}:bell")
        return int(count)

    def prefixes(self) -> list[bytes]:
        found: list[bytes] = self.client.keys("{forebay}:p:*")
        return found


@asynccontextmanager
async def two(server: Server, **tables: Any) -> AsyncIterator[tuple[Running, Running]]:
    """Two gateways before the same two replicas. The deadline of lookups is no matter here: a busy machine would miss
    it, so it is as long as that of any call; nor is it how soon a gateway counts as gone."""
    redis = {"url": f"redis://127.0.0.1:{server.port}/0", "lookup_s": 5.0, "call_s": 5.0, "register_s": 0.02}
    settings = {
        "policy": {"name": "forebay", "seed": 1},
        "tenants": TENANT,
        "redis": redis | {"expiry_s": 30.0} | tables,
    }
    async with (
        Fleet.of(ReplicaSettings(time_scale=10.0), 2) as fleet,
        running(*fleet.urls, **settings) as a,
        running(*fleet.urls, **settings) as b,
    ):
        await until(lambda: up(a) and up(b) and peers(a) == peers(b) == 1)
        yield a, b


def up(g: Running) -> bool:
    assert g.gateway.sharing is not None
    return g.gateway.sharing.store.up


def peers(g: Running) -> int:
    assert g.gateway.sharing is not None
    return len(g.gateway.sharing.registers.peers)
