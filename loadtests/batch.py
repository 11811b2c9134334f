"""What an engine runs: jobs, the result of a step, and the decoding part of the batch kept as sums.

A decoding job takes part in every step, so its state is a function of the step number (tick): computed = offset +
tick. The batch then needs only sums: how many jobs, the sum of offsets (context read per step), how many want a new
block at each tick modulo the block size, and a heap of finishing ticks. While its composition stays the same, the end
of its m-th step is origin + m x (linear + quadratic x m), a closed form used for one step and for many alike, so both
give the same bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt

from loadtests.blocks import Table
from loadtests.profiles import Profile


@dataclass(slots=True, eq=False)
class Job:
    """One request as the engine sees it: lengths, and the chained ids of its units (equal id: equal prefix to its end).

    `chain` covers the prompt, one id per `unit_tokens`, the last may be partial; ids beyond it describe the answer
    (give them where a later prompt holds it). `tag` is the caller's.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    chain: Sequence[int] = ()
    priority: int = 0
    adapter: str | None = None
    tag: object = None

    state: str = "new"  # waiting, running, aborting, then finished or aborted
    cached_tokens: int = 0  # hit at first admission
    preemptions: int = 0
    arrived_at: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    outputs: int = 0  # tokens sampled; while decoding see Engine.outputs

    # the engine's own
    target: int = 0  # tokens to compute before the next one is sampled
    computed: int = 0  # while not decoding
    offset: int = 0  # while decoding: computed tokens minus tick
    finish_tick: int = -1
    arrival: int = 0
    serial: int = 0  # of admission
    ready: int = 0  # first tick that may admit it
    table: Table | None = None


@dataclass(slots=True, eq=False)
class Step:
    """What one engine step (or `steps` decode-only ones) does; it holds at `end`, which `add` and `cancel` may shorten.

    Every decoding job gets one token per step, at equal distance but for the growing context; `first` and `resumed`
    get one at `end`. A job in `skipped` was decoding but got no token (no budget left for it).
    """

    start: float
    end: float = 0.0
    steps: int = 1
    first: list[Job] = field(default_factory=list)  # prompt computed: first token
    resumed: list[Job] = field(default_factory=list)  # computed again after preemption: one more token
    finished: list[Job] = field(default_factory=list)
    skipped: list[Job] = field(default_factory=list)
    preempted: list[Job] = field(default_factory=list)
    decoded: int = 0  # decoding jobs that get `steps` tokens each
    prefill_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens sampled."""
        return self.decoded * self.steps + len(self.first) + len(self.resumed)


class Decodes:
    """The jobs that take one token in every step."""

    __slots__ = (
        "_block",
        "_heap",
        "_linear",
        "_origin",
        "_origin_tick",
        "_quadratic",
        "grow",
        "jobs",
        "known",
        "offsets",
    )

    def __init__(self, block: int) -> None:
        self.jobs: dict[str, Job] = {}
        self.known: dict[str, Job] = {}  # those whose answer has ids, so that others may hit it
        self.offsets = 0  # sum; at tick t the batch reads offsets + len(jobs) x t tokens of context
        self.grow = [0] * block  # jobs that need a new block at ticks = i modulo block
        self._block = block
        self._heap: list[tuple[int, int, Job]] = []
        self._origin: float | None = None
        self._origin_tick = 0
        self._linear = self._quadratic = 0.0

    def enter(self, job: Job, tick: int, known: bool) -> None:
        """`job` has `job.computed` tokens after step `tick` and decodes from the next one on."""
        job.offset = offset = job.computed - tick
        job.finish_tick = job.prompt_tokens + job.output_tokens - 1 - offset
        self.jobs[job.id] = job
        if known:
            self.known[job.id] = job
        self.offsets += offset
        self.grow[(1 - offset) % self._block] += 1
        heapq.heappush(self._heap, (job.finish_tick, job.serial, job))
        self._origin = None

    def leave(self, job: Job, tick: int) -> None:
        del self.jobs[job.id]
        self.known.pop(job.id, None)
        self.offsets -= job.offset
        self.grow[(1 - job.offset) % self._block] -= 1
        job.computed = job.offset + tick
        job.outputs = job.computed - job.prompt_tokens + 1
        job.finish_tick = -1
        self._origin = None

    def disturb(self) -> None:
        """The step made up now is not decode-only: what follows it starts a new closed form."""
        self._origin = None

    def next_finish(self) -> int | None:
        heap = self._heap
        while heap and (heap[0][2].finish_tick != heap[0][0] or heap[0][2].serial != heap[0][1]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def finishing(self, tick: int) -> list[Job]:
        """Takes those that finish at `tick` off the heap, oldest first."""
        done = []
        while self.next_finish() == tick:
            done.append(heapq.heappop(self._heap)[2])
        return done

    def unfinish(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            heapq.heappush(self._heap, (job.finish_tick, job.serial, job))

    def blocks(self, tick: int, steps: int) -> int:
        """Blocks that the `steps` steps after `tick` take."""
        whole, rest = divmod(steps, self._block)
        first = (tick + 1) % self._block
        last = first + rest
        some = sum(self.grow[first:last]) + (sum(self.grow[: last - self._block]) if last > self._block else 0)
        return whole * len(self.jobs) + some

    def affordable(self, tick: int, free: int, most: int) -> int:
        """How many steps after `tick`, at most `most`, `free` blocks allow."""
        n = len(self.jobs)
        if n * (most // self._block + 1) <= free:
            return most
        steps = min(most, (free // n) * self._block)
        free -= (steps // self._block) * n
        while steps < most:
            free -= self.grow[(tick + steps + 1) % self._block]
            if free < 0:
                break
            steps += 1
        return steps

    # -- closed form ---------------------------------------------------------------------------------------------------

    def begin(self, profile: Profile, now: float, tick: int) -> None:
        """A decode-only step starts at `now`; keeps the form that already ends there."""
        if self._origin is not None and self.end(tick) == now:
            return
        n = len(self.jobs)
        self._origin, self._origin_tick = now, tick
        self._quadratic = profile.per_context_token_s * n / 2
        self._linear = profile.step_s(n, n, self.offsets + n * tick, 0.0) + self._quadratic

    def end(self, tick: int) -> float:
        """End of step `tick` of the form."""
        m = tick - self._origin_tick
        assert self._origin is not None
        return self._origin + m * (self._linear + self._quadratic * m)

    def reach(self, when: float, after: int) -> int:
        """First tick above `after` whose end is not before `when`."""
        assert self._origin is not None
        x, a, b = max(when - self._origin, 0.0), self._linear, self._quadratic
        m = (sqrt(a * a + 4 * b * x) - a) / (2 * b) if b > 0 else x / a
        tick = max(self._origin_tick + ceil(m), after + 1)
        while tick > after + 1 and self.end(tick - 1) >= when:
            tick -= 1
        while self.end(tick) < when:
            tick += 1
        return tick
