"""A live run over one or more sending processes, with progress shown by a process that sends nothing.

The sending loop must do nothing but send and read, so even a single sender is its own process: progress bars, JSON
and files stay here. Rows are split by session, else by id; all senders share one start on CLOCK_MONOTONIC, which Linux
gives every process alike. Ctrl-C is this process's business: senders never see it and leave when their pipe closes,
so none outlives us. Trade-off: a second of start-up for each run.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from loadtests.client import Client, Target
from loadtests.drive import Behaviour, Clock, Driver, Tally
from loadtests.playground import instrument, sigint_blocked
from loadtests.record import Record
from loadtests.requests import Shape
from loadtests.schedule import Row, Schedule
from loadtests.sustain import Sustained, SustainVerdict, verdict

START_IN_S = 0.25
REPORT_S = 0.25
WARM_CONNECTIONS = 16
PREPARED_BYTES = 512 * 2**20  # request bodies held ready, all senders together
EVENTS_PER_CORE = 4_000.0  # streamed events/s one sender is asked for, well under what it was measured to keep


class SenderError(RuntimeError):
    """A sending process died or could not start; the text is its last word."""


@dataclass(slots=True, frozen=True)
class LiveRun:
    """What to send where. `time_scale`: how much faster than real time the replicas live."""

    schedule: Schedule
    url: str
    shape: Shape
    behaviour: Behaviour = field(default_factory=Behaviour)
    api_key: str | None = None
    workers: int = 1
    time_scale: float = 1.0
    instrument: bool = False  # senders share this machine with what they measure: take priority


@dataclass(slots=True)
class LiveRecords:
    records: list[Record]
    sustained: SustainVerdict
    connections_opened: int
    connections_reused: int


@dataclass(slots=True)
class Progress:
    """Sum of the senders' counts, and the time of the schedule."""

    at_s: float = 0.0
    in_flight: int = 0
    tally: Tally = field(default_factory=Tally)


def workers_for(schedule: Schedule, stream: bool, cores: int, time_scale: float = 1.0) -> int:
    """How many senders the schedule needs, leaving one core to what is measured where there are several."""
    tokens = sum(row.output_tokens if stream else 1 for row in schedule.rows)
    events_per_s = tokens * time_scale / (schedule.window_s + schedule.drain_s)
    return max(1, min(cores - 1, round(0.5 + events_per_s / EVENTS_PER_CORE)))


def share_of(rows: Sequence[Row], worker: int, workers: int) -> tuple[Row, ...]:
    """Rows of one sender; a session stays whole."""

    def owner(row: Row) -> int:
        return (zlib.crc32(row.session.encode()) if row.session is not None else row.id) % workers

    return tuple(row for row in rows if owner(row) == worker)


def smallest_ttft_s(schedule: Schedule, time_scale: float) -> float | None:
    """In real seconds; what the generator's lag is measured against."""
    bounds = [o.ttft_s for row in schedule.cohort if (o := schedule.objectives(row)).ttft_s is not None]
    return min(bounds) / time_scale if bounds else None


def run(live: LiveRun, show: Callable[[Progress], None] | None = None) -> LiveRecords:
    """Runs to the end. Raises SenderError when a sender dies, KeyboardInterrupt as it comes; leaves no process."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for worker in range(live.workers):
            with sigint_blocked():
                ours, theirs = context.Pipe()
                process = context.Process(target=_sender, args=(theirs, live, worker), daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
        for pipe in pipes:
            _expect(pipe, "ready")
        first_s = min((row.at_s for row in live.schedule.rows if row.at_s is not None), default=0.0)
        start_at = time.perf_counter() + START_IN_S - min(0.0, first_s) / live.time_scale
        for pipe in pipes:
            pipe.send(start_at)
        parts = _collect(pipes, Clock(start_at, live.time_scale), show)
        for process in processes:
            process.join()
    finally:
        with sigint_blocked():
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(timeout=1.0)
                if process.is_alive():
                    process.terminate()
                    process.join()
    records = sorted((record for part, _ in parts for record in part), key=lambda r: r.id)
    sustained = [part for _, part in parts]
    return LiveRecords(
        records,
        verdict(sustained, smallest_ttft_s(live.schedule, live.time_scale)),
        sum(part.connections_opened for part in sustained),
        sum(part.requests_on_open_connections for part in sustained),
    )


def _collect(
    pipes: Sequence[Connection], clock: Clock, show: Callable[[Progress], None] | None
) -> list[tuple[list[Record], Sustained]]:
    latest: dict[int, tuple[Tally, int]] = {}
    done: dict[int, tuple[list[Record], Sustained]] = {}
    while len(done) < len(pipes):
        waiting = [pipe for i, pipe in enumerate(pipes) if i not in done]
        for pipe in wait(waiting, timeout=REPORT_S):
            i = pipes.index(pipe)
            kind, *rest = _receive(pipes[i])
            if kind == "done":
                done[i] = (rest[0], rest[1])
            else:
                latest[i] = (rest[0], rest[1])
        if show is not None:
            show(_sum(latest, clock))
    return [done[i] for i in range(len(pipes))]


def _sum(latest: dict[int, tuple[Tally, int]], clock: Clock) -> Progress:
    total = Progress(clock.now())
    for tally, in_flight in latest.values():
        total.in_flight += in_flight
        for name in Tally.__slots__:
            setattr(total.tally, name, getattr(total.tally, name) + getattr(tally, name))
    return total


def _receive(pipe: Connection) -> Any:
    try:
        message = pipe.recv()
    except (EOFError, ConnectionError):
        raise SenderError("a sending process ended without its records") from None
    if message[0] == "error":
        raise SenderError(message[1])
    return message


def _expect(pipe: Connection, kind: str) -> None:
    got = _receive(pipe)[0]
    if got != kind:
        raise SenderError(f"a sending process said {got!r}, not {kind!r}")


# -- in the sending process ------------------------------------------------------------------------------------------


def _sender(pipe: Connection, live: LiveRun, worker: int) -> None:
    import uvloop

    if live.instrument:
        instrument()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_send(pipe, live, worker))
    except (BrokenPipeError, ConnectionResetError):
        return  # nobody is left to tell
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))


async def _send(pipe: Connection, live: LiveRun, worker: int) -> None:
    clock = Clock(0.0, live.time_scale)
    client = Client(Target.parse(live.url), clock.now, live.api_key)
    schedule = live.schedule
    rows = share_of(schedule.rows, worker, live.workers)
    driver = Driver(schedule, lambda row: live.shape.build(schedule, row), client, clock, live.behaviour, rows)
    driver.prepare(PREPARED_BYTES // live.workers)
    pipe.send(("ready",))
    start_at = await _start_at(pipe)
    clock.start_at = start_at
    await client.warm(WARM_CONNECTIONS)
    running = asyncio.ensure_future(driver.run())
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), running.cancel)  # the parent closed its end
    os.set_blocking(pipe.fileno(), True)  # watching made it otherwise: a message beyond its buffer would be cut
    try:
        while not running.done():
            await asyncio.wait({running}, timeout=REPORT_S)
            if not running.done():
                pipe.send(("tally", driver.tally, driver.in_flight))
        records = await running
    except asyncio.CancelledError:
        return
    finally:
        loop.remove_reader(pipe.fileno())
    pipe.send(("done", records, driver.sustained))


async def _start_at(pipe: Connection) -> float:
    loop = asyncio.get_running_loop()
    told: asyncio.Future[float] = loop.create_future()

    def read() -> None:
        loop.remove_reader(pipe.fileno())
        try:
            told.set_result(pipe.recv())
        except (EOFError, OSError):
            told.set_exception(ConnectionResetError("the parent left"))

    loop.add_reader(pipe.fileno(), read)
    return await told
