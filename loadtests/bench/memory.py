"""Memory of a gateway that goes on serving: whether what it keeps of requests that ended has a bound.

Prompts of 4.4 KB, each of which nobody sent before; its first half is one of 40 that the others begin with too. So
whatever is kept by prompt, by conversation or by time (index of cached prefixes, working set, records) fills up. Looked
at is the private memory (RssAnon) of each process, twelve times at equal numbers of requests. It holds if the most
that a process had in the last four looks is at most 5 % above the most that it had in the four before: a leak of 100
bytes a request would be 20 MB here. What is kept fills up within 200,000 requests, so fewer than 600,000 show less.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID

from loadtests.bench import programs
from loadtests.bench.contenders import Contender
from loadtests.bench.processes import NotReadyError, Server, two_cores
from loadtests.ports import free_ports

REQUESTS, LOOKS = 600_000, 12
CONNECTIONS = 16
BEGINNINGS = tuple(f"You answer for department {n:02}. ".ljust(60, ".") * 40 for n in range(40))
MOST_GROWTH = 1.05


@dataclass(slots=True)
class Memory:
    """Of at least three looks. `looks[i]`: bytes of each process after `answered[i]` answers, `failed` of them none."""

    answered: list[int] = field(default_factory=list)
    looks: list[dict[str, int]] = field(default_factory=list)
    failed: int = 0

    @property
    def growth(self) -> dict[str, float]:
        """Of each process that was there all the time, the most of the last third to the most of the third before."""
        third = len(self.looks) // 3
        last, before = self.looks[-third:], self.looks[-2 * third : -third]
        same = [name for name in last[-1] if all(look.get(name) for look in last + before)]
        return {name: max(look[name] for look in last) / max(look[name] for look in before) for name in same}

    @property
    def holds(self) -> bool:
        same = self.growth.keys() == self.looks[-1].keys()
        return not self.failed and same and max(self.growth.values()) <= MOST_GROWTH


async def _client(port: int, requests: int, seed: int, memory: Memory, progress: Progress, task: TaskID) -> None:
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(requests):
        text = rng.choice(BEGINNINGS) + rng.randbytes(1000).hex()
        body = json.dumps({"model": "null", "max_tokens": 2, "messages": [{"role": "user", "content": text}]}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
        memory.failed += not head.startswith(b"http/1.1 200")
        progress.advance(task)
    writer.close()


def measure(contender: Contender, requests: int, console: Console) -> Memory:
    """That many requests in a closed loop. Raises NotReadyError when the gateway does not start, or does not stay."""
    memory = Memory()
    with tempfile.TemporaryDirectory(prefix="forebay-memory-") as folder, ExitStack() as running:
        into = Path(folder)
        load_core, gateway_core = two_cores()
        ports = free_ports(3)
        replica = programs.command("null_replica", into, console)
        replicas = Server([*replica, "10000", *map(str, ports[:2])], into / "replicas.log", load_core)
        running.callback(replicas.stop)
        urls = [f"http://127.0.0.1:{port}" for port in ports[:2]]
        replicas.wait_ready(f"{urls[0]}/health")
        server = Server(contender.argv(ports[2], urls), into / "gateway.log", load_core | gateway_core)
        running.callback(server.stop)
        server.wait_ready(f"http://127.0.0.1:{ports[2]}{contender.ready_path}")
        each = max(1, requests // LOOKS // CONNECTIONS)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("requests", total=each * CONNECTIONS * LOOKS)

            async def some(look: int) -> None:
                seeds = range(look * CONNECTIONS, (look + 1) * CONNECTIONS)
                clients = (_client(ports[2], each, seed, memory, progress, task) for seed in seeds)
                try:
                    await asyncio.gather(*clients)
                except (OSError, EOFError) as error:
                    raise NotReadyError(f"the gateway broke off ({error}):\n{server.log_tail()}") from None

            for look in range(LOOKS):
                asyncio.run(some(look))
                memory.answered.append(each * CONNECTIONS * (look + 1))
                memory.looks.append(server.private_bytes())
                progress.console.print(_line(memory))
    return memory


def _line(memory: Memory) -> str:
    each = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in memory.looks[-1].items())
    return f"{memory.answered[-1]:,} answers, MiB: {each}"
