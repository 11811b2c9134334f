"""`forebay replica`: simulated vLLM replicas on consecutive ports of one process.

A laptop can hold a fleet: no weights, no GPU, one event loop. What they do is the engine model's (`engine.py`), how
long it takes is a profile's (`profiles.py`), how it looks on the wire is vLLM 0.32's. Faults are ordered over HTTP
(`faults.py`). SIGTERM acts as vLLM's: without `--shutdown-timeout` open answers end at once with finish reason
`abort`; with it what runs is finished, the port stays open, and each new request is answered with nothing and
`abort`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
from collections.abc import Sequence
from typing import Annotated

import typer

from loadtests import profiles
from loadtests.engine import EngineConfig
from loadtests.faults import Command
from loadtests.live_replica import Replica, ReplicaSettings
from loadtests.replica_routes import Routes

__all__ = ["EngineConfig", "Fleet", "Replica", "ReplicaSettings"]


class Fleet:
    """Several replicas in this process: `async with Fleet.of(...) as fleet: fleet.urls`."""

    def __init__(self, members: Sequence[Routes]) -> None:
        self.members = members
        for member in members:
            member.peers = members

    @classmethod
    def of(cls, settings: ReplicaSettings, count: int = 1, host: str = "127.0.0.1", port: int = 0) -> Fleet:
        """Must be called on the running loop. Port 0: every replica takes a free port."""
        return cls([Routes(settings, host, port + i if port else 0, f"sim-{i}") for i in range(count)])

    @property
    def urls(self) -> list[str]:
        return [member.url for member in self.members]

    async def __aenter__(self) -> Fleet:
        for member in self.members:
            await member.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.members:
            await member.stop()


def replica(
    port: Annotated[int, typer.Option(help="First port; the others follow.", min=1, max=65535)] = 8101,
    count: Annotated[int, typer.Option(help="Replicas in this process.", min=1, max=512)] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    profile: Annotated[
        str, typer.Option(help=f"Step times: {', '.join(profiles.PROFILES)} (third-party figures), or a JSON file.")
    ] = "a100-8b",
    max_batched_tokens: Annotated[int | None, typer.Option(help="Token budget of a step.", min=1)] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests in one batch.", min=1)] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Context length in tokens.", min=2)] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV cache blocks.", min=2)] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block.", min=1)] = None,
    time_scale: Annotated[float, typer.Option(help="Run X times faster than the clock.", min=0.001)] = 1.0,
    stream_interval: Annotated[int, typer.Option(help="Tokens per streamed event.", min=1)] = 1,
    model: Annotated[str, typer.Option(help="Served model name.")] = "sim",
    adapters: Annotated[str, typer.Option(help="LoRA names, comma separated.")] = "",
    max_loras: Annotated[int, typer.Option(help="Adapters in one batch.", min=0)] = 4,
    lora_load_ms: Annotated[float, typer.Option(help="Time to load an adapter.", min=0)] = 50.0,
    scheduling_policy: Annotated[str, typer.Option(help="fcfs or priority.")] = "fcfs",
    max_num_queued_reqs: Annotated[int | None, typer.Option(help="Beyond it: 503.", min=1)] = None,
    max_num_queued_tokens: Annotated[int | None, typer.Option(help="Beyond it: 503.", min=1)] = None,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds to drain after SIGTERM; 0 aborts.", min=0)] = 0.0,
) -> None:
    """Simulated vLLM replicas: HTTP, SSE, /metrics, prefix cache, preemption, faults.

    Example: forebay replica --port 8101 --count 4 --profile a100-8b --stream-interval 4

    A fault: curl -d '{"kind": "hang", "for_s": 10}' localhost:8101/forebay/fault
    """
    if port + count - 1 > 65535:
        last = f"the last port would be {port + count - 1}; at most 65535 would be right"
        typer.echo(f"forebay replica: --port {port} --count {count}: {last}", err=True)
        raise typer.Exit(2)
    names = tuple(name.strip() for name in adapters.split(",") if name.strip())
    try:
        settings = ReplicaSettings(
            engine=EngineConfig(
                profiles.load(profile),
                max_num_batched_tokens=max_batched_tokens,
                max_num_seqs=max_num_seqs if max_num_seqs or not max_batched_tokens else min(256, max_batched_tokens),
                max_model_len=max_model_len,
                num_blocks=num_blocks,
                block_size=block_size,
                scheduling_policy=scheduling_policy,
                max_loras=max_loras if names else 0,
                lora_load_s=lora_load_ms / 1000,
                max_num_queued_reqs=max_num_queued_reqs,
                max_num_queued_tokens=max_num_queued_tokens,
            ),
            model=model,
            adapters=names,
            time_scale=time_scale,
            stream_interval=stream_interval,
            drain_s=shutdown_timeout,
        )
        _run(settings, count, host, port)
    except (ValueError, OSError) as problem:
        typer.echo(f"forebay replica: {_no_socket(problem, host, port, count) or problem}", err=True)
        raise typer.Exit(2) from None


def _no_socket(problem: Exception, host: str, port: int, count: int) -> str | None:
    """The line where it may not listen; None for another problem."""
    if isinstance(problem, socket.gaierror):
        return f"--host {host}: {problem.strerror}; an address of this machine would be right"
    if not isinstance(problem, OSError) or problem.filename is not None:
        return None
    ports = f"--port {port}" if count == 1 else f"--port {port} --count {count}"
    why = os.strerror(problem.errno) if problem.errno else str(problem)
    return f"--host {host} {ports}: cannot listen there: {why}; another --host or --port would be right"


def _run(settings: ReplicaSettings, count: int, host: str, port: int) -> None:
    import uvloop

    gc.freeze()
    uvloop.run(_serve(settings, count, host, port))


async def _serve(settings: ReplicaSettings, count: int, host: str, port: int) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    async with Fleet.of(settings, count, host, port) as fleet:
        for url in fleet.urls:
            typer.echo(f"simulated vLLM replica {url} ({settings.model}, {settings.engine.profile.name})")
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, stopped.set)
        await stopped.wait()
        if not settings.drain_s:
            for member in fleet.members:
                member.order(Command("abort"))
            await asyncio.sleep(0.05)  # let the last bytes leave
            return
        for member in fleet.members:
            member.order(Command("drain"))
        with contextlib.suppress(TimeoutError):
            quiet = asyncio.gather(*(member.replica.quiet.wait() for member in fleet.members))
            await asyncio.wait_for(quiet, settings.drain_s)
