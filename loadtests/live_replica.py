"""A simulated vLLM replica in real time: the engine model, a clock, and answers that grow token by token.

The engine says when a step ends; the replica sleeps until then, hands every running answer its token and makes up
the next step from the *due* time, not from the time it woke, so that a late wake-up does not slow the simulated
machine. How late it woke is the lag; a run whose lag p99 is over 10 ms measured this process and not the gateway:
it is INVALID. `time_scale` X runs the engine X times faster than the clock; objectives must then be scaled too.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import Protocol

from loadtests import tokens
from loadtests.engine import Engine, EngineConfig, Job, Step
from loadtests.faults import Faults
from loadtests.replica_api import ApiError, Call
from loadtests.replica_metrics import Figures
from loadtests.replica_shapes import END, Shape, Usage, error_event, shape

BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
BACKLOG = "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
LAG_LIMIT_S = 0.010


@dataclass(slots=True, frozen=True)
class ReplicaSettings:
    engine: EngineConfig = field(default_factory=EngineConfig)
    model: str = "sim"
    adapters: tuple[str, ...] = ()
    time_scale: float = 1.0
    stream_interval: int = 1  # tokens per event
    api_key: str | None = None
    drain_s: float = 0.0  # as vLLM's --shutdown-timeout: 0 aborts what runs when stopped


class Sink(Protocol):
    """Where an answer goes: one HTTP exchange."""

    def head(self) -> None: ...

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def respond(self, status: int, body: object) -> None: ...

    def cut(self) -> None: ...


class Choice:
    """One of the answers of a call, and its job in the engine."""

    __slots__ = ("answer", "buffer", "fault_at", "index", "job", "reason", "seed", "sent")

    def __init__(self, answer: Answer, index: int, seed: int, reason: str, fault_at: int) -> None:
        self.answer = answer
        self.index = index
        self.seed = seed
        self.reason = reason
        self.sent = 0
        self.buffer = b""
        self.fault_at = fault_at
        self.job: Job


class Answer:
    """One call under way: its choices, its usage, and where it is written."""

    __slots__ = ("call", "choices", "last_at", "open", "received_at", "replica", "shape", "sink", "usage")

    def __init__(self, replica: Replica, call: Call, sink: Sink, received_at: float) -> None:
        self.replica = replica
        self.call = call
        self.sink = sink
        self.shape: Shape = shape(call)
        self.usage = Usage(prompt=sum(tokens.count(p) for p in call.prompts))
        self.choices: list[Choice] = []
        self.open = 0
        self.received_at = received_at

    def begin(self, choice: Choice) -> None:
        """The prompt is computed; the first token follows."""
        self.usage.cached += choice.job.cached_tokens if choice.index % self.call.n == 0 else 0
        if self.call.stream:
            packed = self.call.prompts[choice.index // self.call.n]
            if envelope := self.shape.first(choice.index, packed, self.usage):
                self.sink.write(envelope)

    def token(self, choice: Choice, last: bool) -> None:
        sent = choice.sent
        choice.sent = sent + 1
        if sent == choice.fault_at:
            self.replica.strike(self)
            return
        self.usage.completion += 1
        if not self.call.stream:
            if last:
                self._end(choice)
            return
        text = tokens.word(choice.seed, sent)
        interval = self.replica.settings.stream_interval
        if interval > 1:
            text = choice.buffer + text
            if not last and sent and (sent + 1) % interval:
                choice.buffer = text
                return
            choice.buffer = b""
        packed = None
        if not sent and self.call.return_token_ids:
            packed = self.call.prompts[choice.index // self.call.n]
        if last:
            self.sink.write(self.shape.finish(choice.index, text, choice.reason, self.usage, packed))
            self._end(choice)
        else:
            self.sink.write(self.shape.token(choice.index, text, self.usage, packed))

    def text(self, choice: Choice) -> bytes:
        return tokens.answer(choice.seed, choice.sent)

    def abort(self) -> None:
        """vLLM's stop without drain: what is there ends cleanly, with finish reason `abort`."""
        for choice in self.choices:
            choice.reason = "abort"
            if self.call.stream:
                if not choice.sent:
                    self.begin(choice)
                self.sink.write(self.shape.finish(choice.index, choice.buffer, "abort", self.usage))
        self.open = 1
        self._end(self.choices[0])
        self.replica.leave(self)

    def fail(self, message: str = DEAD, kind: str = "InternalServerError", code: int = 500) -> None:
        """An error inside a stream, or a status of its own when nothing is streamed."""
        if self.call.stream:
            self.sink.write(error_event(message, kind, code) + self.shape.done + END)
            self.sink.close()
        else:
            self.sink.respond(code, {"error": {"message": message, "type": kind, "param": None, "code": code}})
        self.replica.leave(self)

    def _end(self, choice: Choice) -> None:
        self.open -= 1
        if self.open:
            return
        first = self.choices[0]
        if self.call.stream:
            text = self.text(first).decode() if self.call.api == "responses" else ""
            self.sink.write(self.shape.closing(self.usage, text, first.reason) + END)
            self.sink.close()
        else:
            done = [(self.text(c), c.reason) for c in self.choices]
            self.sink.respond(200, self.shape.whole(done, self.call.prompts, self.usage))
        self.replica.forget(self)


class Replica:
    """One engine, its answers and its faults. Everything runs on the event loop's thread."""

    def __init__(self, settings: ReplicaSettings, name: str = "sim") -> None:
        self.settings = settings
        self.name = name
        self.engine = Engine(settings.engine)
        self.faults = Faults()
        self.figures = Figures()
        self.started_at = time.time()
        self.answers: dict[Answer, None] = {}
        self.quiet = asyncio.Event()  # set while no answer is under way
        self.quiet.set()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._serial = 0

    def now(self) -> float:
        """Engine time."""
        return self._loop.time() * self.settings.time_scale

    def submit(self, call: Call, sink: Sink) -> Answer:
        """Starts an answer; the caller gives it to `leave` if the client goes.

        Raises ApiError where vLLM refuses before the response starts.
        """
        now = self.now()
        answer = Answer(self, call, sink, now)
        if self.faults.draining:
            answer.choices = [Choice(answer, i, 0, "abort", -1) for i in range(call.n * len(call.prompts))]
            for choice in answer.choices:
                choice.job = Job("", 1, 1)
            if call.stream:
                sink.head()
            answer.abort()
            return answer
        for p, packed in enumerate(call.prompts):
            ids = None
            for s in range(call.n):
                seed = tokens.seed_of(packed, s)
                room = self.engine.max_model_len - tokens.count(packed)
                length, reason = call.output_tokens(seed, room)
                choice = Choice(answer, p * call.n + s, seed, reason, self.faults.strike_after(length))
                if ids is None or s:
                    ids = tokens.chain(packed + tokens.answer(seed, length), self.engine.block, call.cache_salt)
                self._serial += 1
                choice.job = Job(
                    f"{self._serial}", tokens.count(packed), length, ids, call.priority, call.adapter, tag=choice
                )
                refused = self.engine.add(choice.job, now)
                if refused is not None:
                    self.leave(answer)
                    raise ApiError(503, BACKLOG if refused == "max_num_queued_tokens" else BUSY, "Service Unavailable")
                answer.choices.append(choice)
        answer.open = len(answer.choices)
        self.answers[answer] = None
        self.quiet.clear()
        if call.stream:
            sink.head()
            if envelope := answer.shape.accepted():
                sink.write(envelope)
        if self.engine.current is None and not self.faults.frozen:
            self._next(now)
        return answer

    def leave(self, answer: Answer) -> None:
        """The client is gone, or the answer was given up: its jobs end with the step under way."""
        self.forget(answer)
        now = self.now()
        for choice in answer.choices:
            self.engine.cancel(choice.job, now)

    def forget(self, answer: Answer) -> None:
        """The answer is complete, and so are its jobs."""
        self.answers.pop(answer, None)
        if not self.answers:
            self.quiet.set()

    # -- the clock -------------------------------------------------------------------------------------------------

    def _next(self, at: float) -> None:
        self._timer = None
        step = self.engine.step(at)
        if step is None:
            return
        if self.faults.slow != 1.0:
            step.end = step.start + (step.end - step.start) * self.faults.slow
        self._timer = self._loop.call_at(step.end / self.settings.time_scale, self._tick, step)

    def _tick(self, step: Step) -> None:
        self.figures.lag_s.observe(self._loop.time() - step.end / self.settings.time_scale)
        self.figures.step(step)
        finished = step.finished
        skipped = step.skipped
        for job in tuple(self.engine.decoding.values()):
            if job.state != "running" or (skipped and job in skipped):
                continue
            choice = job.tag
            assert isinstance(choice, Choice)
            choice.answer.token(choice, bool(finished) and job in finished)
        for jobs in (step.first, step.resumed):
            for job in tuple(jobs):
                choice = job.tag
                assert isinstance(choice, Choice)
                if jobs is step.first:
                    choice.answer.begin(choice)
                choice.answer.token(choice, job in finished)
        for job in tuple(finished):
            self.figures.finished(job, step.end)
        self._next(step.end)

    # -- faults ----------------------------------------------------------------------------------------------------

    def strike(self, answer: Answer) -> None:
        """The fault that was due at this token of this answer."""
        if self.faults.strike_kind == "cut":
            answer.sink.cut()
            self.leave(answer)
        else:
            answer.fail()

    def freeze(self, why: str) -> None:
        """Hung, paused or asleep: no step ends any more; the gauges keep their last value."""
        self.faults.frozen = why
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def thaw(self) -> None:
        self.faults.frozen = None
        if self._timer is not None:
            return
        now = self.now()
        if (step := self.engine.current) is not None:
            step.end = max(step.end, now)
            self._timer = self._loop.call_at(step.end / self.settings.time_scale, self._tick, step)
        else:
            self._next(now)

    def crash(self) -> None:
        """The engine process died: open streams get an error event, the rest 500."""
        for answer in list(self.answers):
            answer.fail()
        self.freeze("dead")

    def abort_all(self) -> None:
        for answer in list(self.answers):
            answer.abort()

    def reset_prefix_cache(self) -> bool:
        return self.engine.reset_prefix_cache()

    def restart(self) -> None:
        """As a new process: empty cache, zero counters."""
        for answer in list(self.answers):
            answer.sink.cut()
            self.forget(answer)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.engine = Engine(self.settings.engine)
        self.faults = Faults()
        self.figures = Figures()
        self.started_at = time.time()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for answer in list(self.answers):
            answer.sink.cut()
        self.answers.clear()


def new_id() -> str:
    return uuid.uuid4().hex
