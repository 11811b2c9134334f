"""One sending process of a live run: rows at their times, answers read, every row followed to an end.

Open loop: a row is sent at its scheduled time whatever came before; a later turn of a closed-loop session is
scheduled at the end of the previous answer + think time, and never becomes due behind a failed turn. Every row
ends in exactly one partition; what is open at W + D is unfinished. With `concurrency` N workers send the next row
when the last one ended: load then falls when the server slows, so the result is labelled response-paced.
While it runs nothing but sending and reading happens here: bodies are made ahead, garbage collection is off,
JSON and files come after. Trade-off: a row sent during another's long body waits for it; the lag shows it.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loadtests.answer import Answer
from loadtests.client import Client
from loadtests.record import ERRORS, Record
from loadtests.retry import NONE, RetryProfile
from loadtests.schedule import Row, Schedule
from loadtests.sustain import LOCAL_ERRNOS, LoopProbe, Sustained
from policies.objectives import Partition

BEHIND = "behind a failed turn"
AHEAD = 64  # rows looked at for bodies that are still to be made
SPARE_S = 0.002  # real seconds: a body is made only when the next row is further away


class Clock:
    """Seconds of the schedule: 0 at the start of the window, `scale` times faster than real ones.

    The driver knows no other time: whatever it waits for is set here.
    """

    def __init__(self, start_at: float, scale: float = 1.0) -> None:
        self.start_at, self.scale = start_at, scale  # start_at in time.perf_counter(), which processes share

    def now(self) -> float:
        return (time.perf_counter() - self.start_at) * self.scale

    def real(self, seconds: float) -> float:
        return seconds / self.scale

    def call_at(self, at_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """At once where that time has passed."""
        return asyncio.get_running_loop().call_later(self.real(at_s - self.now()), callback)

    async def until(self, at_s: float) -> None:
        if at_s <= self.now():
            return
        reached = asyncio.Event()
        timer = self.call_at(at_s, reached.set)
        try:
            await reached.wait()
        finally:
            timer.cancel()


@dataclass(slots=True, frozen=True)
class WireRequest:
    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    streamed: bool = True
    forced_tokens: int | None = None


@dataclass(slots=True, frozen=True)
class Behaviour:
    """How the clients behave."""

    hang_up_at_deadline: bool = True  # the client closes at the end of its E2E objective
    patience_s: float | None = None  # median of a log-normal patience for the first token; None: endless
    retries: RetryProfile = NONE
    concurrency: int | None = None  # response-paced view
    keep_text_share: float = 0.0  # of answers kept for an answer check
    seed: int = 0


@dataclass(slots=True)
class Tally:
    """Live counts for a progress bar; the result is computed from the records, not from these."""

    due: int = 0
    done: int = 0
    good: int = 0
    shed: int = 0
    errors: int = 0  # as `error_rate` counts them


class Driver:
    """Owns the records, the pending tasks and the bodies made ahead."""

    def __init__(
        self,
        schedule: Schedule,
        build: Callable[[Row], WireRequest],
        client: Client,
        clock: Clock,
        behaviour: Behaviour | None = None,
        rows: tuple[Row, ...] | None = None,
    ) -> None:
        self.schedule, self.client, self.clock = schedule, client, clock
        self.behaviour = behaviour or Behaviour()
        self.tally = Tally()
        self.sustained = Sustained()
        self._build = build
        self._rows = schedule.rows if rows is None else rows
        counted = {row.id for row in schedule.cohort}
        self.records = {row.id: Record.of(row, row.id in counted) for row in self._rows}
        self._bodies: dict[int, WireRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._open_counted = sum(r.counted for r in self.records.values())
        self._all_counted_done = asyncio.Event()
        if not self._open_counted:
            self._all_counted_done.set()

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    def prepare(self, limit_bytes: int) -> None:
        """Makes bodies before the run, first rows first, up to this many bytes; the rest is made while it waits."""
        size = 0
        for row in self._rows:
            if size >= limit_bytes:
                break
            request = self._build(row)
            self._bodies[row.id] = request
            size += len(request.body)
        gc.collect()  # here, not in the run: it takes a second on a busy machine, and the first rows would be late

    async def run(self) -> list[Record]:
        """Runs to W + D, or until every counted row has ended; gives a record for each row, in order of row."""
        gc.freeze()
        gc.disable()
        probe = LoopProbe()
        probing = asyncio.ensure_future(probe.run())
        pacing = asyncio.ensure_future(self._response_paced() if self.behaviour.concurrency else self._open_loop())
        try:
            await self._until_end(pacing)
        finally:
            self._closing = True
            ended_s = self.clock.now()
            for task in (pacing, probing, *self._tasks):
                task.cancel()
            await asyncio.gather(pacing, probing, *self._tasks, return_exceptions=True)
            self.client.close()
            gc.enable()
            gc.unfreeze()
        self._note(probe, ended_s)
        return [self.records[row.id] for row in self._rows]

    async def _until_end(self, pacing: asyncio.Task[None]) -> None:
        over = asyncio.Event()
        timer = self.clock.call_at(self.schedule.window_s + self.schedule.drain_s, over.set)
        ended = asyncio.ensure_future(self._all_counted_done.wait())
        late = asyncio.ensure_future(over.wait())
        try:
            # a failure of the pacing itself is raised, not waited out
            done, _ = await asyncio.wait({ended, late, pacing}, return_when=asyncio.FIRST_COMPLETED)
            if pacing in done:
                pacing.result()
                await asyncio.wait({ended, late}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            late.cancel()
            ended.cancel()

    # -- pacing ----------------------------------------------------------------------------------------------------

    async def _open_loop(self) -> None:
        timed = sorted((row for row in self._rows if row.at_s is not None), key=lambda r: (r.at_s or 0.0, r.id))
        for i, row in enumerate(timed):
            self._prepare(timed[i : i + AHEAD], row.at_s or 0.0)
            await self.clock.until(row.at_s or 0.0)
            self._start(row, row.at_s or 0.0)

    async def _response_paced(self) -> None:
        """Sessions, and rows without one, in order of start; each worker takes the next when it is free."""
        units: list[list[Row]] = []
        for row in sorted((r for r in self._rows if r.at_s is not None), key=lambda r: (r.at_s or 0.0, r.id)):
            later = self.schedule.sessions[row.session][1:] if row.session is not None and row.turn == 0 else []
            units.append([row, *(r for r in later if r.at_s is None)])
        queue = iter(units)

        async def worker() -> None:
            for unit in queue:
                for row in unit:
                    record = self.records[row.id]
                    scheduled = self.clock.now()
                    if scheduled >= self.schedule.window_s:
                        return
                    await self._logical(row, scheduled)
                    if not record.complete:
                        for lost in unit[unit.index(row) + 1 :]:
                            self.records[lost.id].reason = f"{BEHIND}: {record.reason or record.partition}"
                        break

        for record in self.records.values():
            record.counted = False  # counted when it starts: the number offered depends on the server
        await self.clock.until(min(0.0, units[0][0].at_s or 0.0) if units else 0.0)
        await asyncio.gather(*(worker() for _ in range(self.behaviour.concurrency or 1)))
        self._all_counted_done.set()

    def _prepare(self, rows: list[Row], due_s: float) -> None:
        for row in rows:
            if row.id not in self._bodies:
                if row is not rows[0] and self.clock.real(due_s - self.clock.now()) < SPARE_S:
                    return
                self._bodies[row.id] = self._build(row)

    def _start(self, row: Row, scheduled_s: float) -> None:
        task = asyncio.ensure_future(self._logical(row, scheduled_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _next_turn(self, row: Row, record: Record) -> None:
        if row.session is None or self.behaviour.concurrency:
            return
        turns = self.schedule.sessions[row.session]
        later = turns[turns.index(row) + 1 :]
        if not later or later[0].at_s is not None:
            return
        if not record.complete:
            for lost in later:
                behind = self.records[lost.id]
                behind.reason = f"{BEHIND}: {record.reason or record.partition}"
                self._close(behind)
            return
        following = later[0]
        if following.id not in self._bodies:
            self._bodies[following.id] = self._build(following)
        at_s = (record.end_s or self.clock.now()) + following.think_s
        task = asyncio.ensure_future(self._later(following, at_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _later(self, row: Row, at_s: float) -> None:
        await self.clock.until(at_s)
        await self._logical(row, at_s)

    # -- one logical request ---------------------------------------------------------------------------------------

    async def _logical(self, row: Row, scheduled_s: float) -> None:
        record = self.records[row.id]
        record.scheduled_s = scheduled_s
        self.sustained.due += 1
        self.tally.due += 1
        request = self._bodies.pop(row.id, None) or self._build(row)
        rng = random.Random(f"{self.behaviour.seed}/{row.id}")
        record.dispatched_s = self.clock.now()
        self.sustained.dispatched += 1
        self.sustained.lags_s.append(self.clock.real(max(0.0, record.dispatched_s - scheduled_s)))
        if self.behaviour.concurrency:
            record.counted = 0.0 <= scheduled_s < self.schedule.window_s
        try:
            await self._attempts(row, record, request, rng)
        except asyncio.CancelledError:
            record.partition, record.reason = Partition.UNFINISHED, "open at the end of the drain"
            raise
        finally:
            self._close(record)
            if not self._closing:
                self._next_turn(row, record)

    async def _attempts(self, row: Row, record: Record, request: WireRequest, rng: random.Random) -> None:
        loop = asyncio.get_running_loop()
        objectives = self.schedule.objectives(row)
        scheduled_s = record.scheduled_s or 0.0
        answer = self._answer(request, rng)
        limit = asyncio.timeout(None)
        timers: list[asyncio.TimerHandle] = []

        def leave() -> None:
            if not limit.expired():
                limit.reschedule(loop.time())

        def lose_patience() -> None:
            if answer.first_content_at is None:
                leave()

        if self.behaviour.hang_up_at_deadline and objectives.e2e_s is not None:
            timers.append(self.clock.call_at(scheduled_s + objectives.e2e_s, leave))
        if self.behaviour.patience_s is not None:
            drawn = self.behaviour.patience_s * rng.lognormvariate(0.0, 0.5)
            timers.append(self.clock.call_at(scheduled_s + drawn, lose_patience))
        try:
            async with limit:
                while True:
                    headers, broke = await self._attempt(record, request, answer)
                    wait = None
                    if broke is None or answer.status is None:
                        wait = self.behaviour.retries.wait_s(record.attempts - 1, answer.status, headers, rng)
                    if wait is None or answer.fault() is None or answer.content_events:
                        break
                    await self.clock.until(self.clock.now() + wait)
                    record.wasted_tokens += answer.output_tokens or answer.content_events
                    answer = self._answer(request, rng)
            record.read(answer)
            record.settle(answer, objectives)
            if broke is not None and not record.complete and not record.reason.startswith("in_band"):
                record.reason = f"{record.reason}: {broke}"
        except TimeoutError:
            record.read(answer)
            record.partition = Partition.ABANDONED
            record.reason = "before the first token" if answer.first_content_at is None else "at the deadline"
        except asyncio.CancelledError:
            record.read(answer)
            raise
        finally:
            for timer in timers:
                timer.cancel()

    def _answer(self, request: WireRequest, rng: random.Random) -> Answer:
        share = self.behaviour.keep_text_share
        keep = share > 0.0 and rng.random() < share
        return Answer(request.streamed, forced_tokens=request.forced_tokens, keep_text=keep)

    async def _attempt(
        self, record: Record, request: WireRequest, answer: Answer
    ) -> tuple[Mapping[str, str], str | None]:
        """One HTTP exchange: its response headers, and what broke it if anything did."""
        record.attempts += 1
        headers = dict(request.headers)
        if record.attempts > 1 and "x-request-id" in headers:
            headers["x-request-id"] += f"-{record.attempts}"  # a repeated id may still run on a replica
        try:
            got = await self.client.send(request.path, request.body, answer, headers=headers)
        except OSError as error:
            if error.errno in LOCAL_ERRNOS:
                self.sustained.local_errors += 1
            return {}, str(error) or type(error).__name__
        record.replica = got.get("x-forebay-replica", record.replica)
        queued = got.get("x-forebay-queue-ms")
        if queued is not None:
            record.queue_s = float(queued) / 1e3 * self.clock.scale
        return got, None

    def _close(self, record: Record) -> None:
        """The row has ended."""
        if record.end_s is None and record.attempts and record.partition is not Partition.UNFINISHED:
            record.end_s = self.clock.now()  # broken or abandoned: when the client was done with it
        tally = self.tally
        tally.done += 1
        if record.partition is Partition.GOOD:
            tally.good += 1
        elif record.partition is Partition.REJECTED:
            tally.shed += 1
        elif record.partition in ERRORS:
            tally.errors += 1
        if record.counted:
            self._open_counted -= 1
            if self._open_counted <= 0 and not self.behaviour.concurrency:
                self._all_counted_done.set()

    def _note(self, probe: LoopProbe, ended_s: float) -> None:
        for row in self._rows:
            record = self.records[row.id]
            was_due = row.at_s is not None and row.at_s <= ended_s and not self.behaviour.concurrency
            if was_due and record.counted and record.scheduled_s is None:
                self.sustained.due += 1  # and nobody sent it
            if record.scheduled_s is None and not record.reason:
                record.reason = "due and never sent" if was_due else "not reached by the end of the run"
        self.sustained.stalls_s = probe.late_s
        self.sustained.cpu_share = probe.cpu_share()
        self.sustained.connections_opened = self.client.opened
        self.sustained.requests_on_open_connections = self.client.reused
