"""A vLLM replica in virtual time: scheduler, KV blocks and step time, without clock or I/O.

Follows vLLM V1 (0.33): a token budget per step; running requests first, in order of admission; chunked prefill;
prefix cache of whole blocks, at most prompt - 1 tokens; whole-prompt admission; preemption of the youngest to the
front of the queue; fcfs or priority; LoRA slots; queue limits. Step time: `profiles.py`. Blocks: `blocks.py`.

Use: `add`, then `step(now)`; it returns what will have happened at `Step.end`; call `step(end)` again then. With
`until` one Step covers many decode-only steps in closed form, with the same results. `add` and `cancel` may shorten
such a step: read `engine.current.end` after them and drop events that no longer match it.
Decoding requests are kept as sums (how many, context, blocks due by step number modulo the block), so a step costs
O(1) in them. Left out: speculative decoding, several KV cache groups, structured output, P/D transfer; the extra slot
that asynchronous scheduling may give a finished request.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from loadtests.batch import Job, Step
from loadtests.scheduler import Counters, EngineConfig, Scheduler

__all__ = ["Counters", "Engine", "EngineConfig", "Gauges", "Job", "Step"]


@dataclass(slots=True, frozen=True)
class Gauges:
    """As vLLM shows them: of the end of the last step."""

    running: int = 0
    waiting: int = 0
    deferred: int = 0  # of these, waiting for a LoRA slot
    kv_usage: float = 0.0  # blocks held by live requests; cached but free ones count as free
    steps: int = 0  # counters as of the same moment
    generation_tokens: int = 0


class Engine(Scheduler):
    """One replica. All times are seconds on the caller's axis; the caller passes them and never goes back."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(config or EngineConfig())
        self._unseen = 0  # arrivals since the step under way was made up
        self._seen = 0  # the last arrival before that
        self._seen_waiting = 0
        self._gauges = Gauges()

    # -- what callers do -----------------------------------------------------------------------------------------------

    def add(self, job: Job, now: float) -> str | None:
        """Queue a request. Returns None, or the name of the queue limit that refuses it (vLLM: 503).

        Raises ValueError for a prompt that does not fit max_model_len (vLLM: 400) or a known id.
        """
        if not 0 < job.prompt_tokens < self.max_model_len or job.output_tokens < 1:
            raise ValueError(
                f"request {job.id}: {job.prompt_tokens} prompt and {job.output_tokens} output tokens; "
                f"max_model_len is {self.max_model_len} and both must be at least 1"
            )
        if job.state != "new":
            raise ValueError(f"request {job.id} was added before")
        if job.adapter is not None and not self.config.max_loras:
            raise ValueError(f"request {job.id}: adapter {job.adapter!r}, but max_loras is 0")
        limits = self.config
        if limits.max_num_queued_reqs is not None and self.unfinished >= limits.max_num_queued_reqs:
            self.counters.rejected["max_num_queued_reqs"] += 1
            return "max_num_queued_reqs"
        if limits.max_num_queued_tokens is not None and self._queued_tokens >= limits.max_num_queued_tokens:
            self.counters.rejected["max_num_queued_tokens"] += 1
            return "max_num_queued_tokens"
        self._cut(now)
        self._serial += 1
        job.state = "waiting"
        job.arrived_at = now
        job.arrival = self._serial
        job.output_tokens = min(job.output_tokens, self.max_model_len - job.prompt_tokens)
        job.target = job.prompt_tokens
        job.ready = self._tick + 1
        if self.current is not None:
            job.ready = self._tick + self.current.steps + (2 if limits.async_scheduling else 1)
        if job.adapter is not None:
            salt = int.from_bytes(blake2b(job.adapter.encode(), digest_size=8).digest(), "big")
            job.chain = [unit ^ salt for unit in job.chain]
        self._queued_tokens += job.prompt_tokens
        self._unseen += 1
        self._enqueue(job, front=False)
        return None

    def cancel(self, job: Job, now: float) -> bool:
        """The client left: out of the queue at once, out of the batch when the step under way ends."""
        if job.state == "waiting":
            self._cut(now)  # it may have blocked the one behind it
            self._waiting.remove(job)
            self._unseen -= job.arrival > self._seen
            self._settle(job, "aborted", now)
            return True
        if job.state != "running":
            return False
        self._cut(now)
        job.state = "aborting"
        self._aborted.append(job)
        if (step := self.current) is not None:
            if job in step.first:
                job.first_token_at = None
            for some in (step.finished, step.first, step.resumed):
                if job in some:
                    some.remove(job)
        return True

    def step(self, now: float, until: float | None = None) -> Step | None:
        """End the step under way (now must be its end), make up the next one. None when there is nothing to run.

        With `until` the step covers as many decode-only steps as begin before it; the composition of the batch does
        not change in them. Without it, one.
        """
        if self.current is not None:
            self._commit(self.current)
        self.current = None
        self._unseen = 0
        self._seen = self._serial
        while self.current is None and (self.running or self._waiting):
            preempted = self.counters.preemptions
            self.current = self._schedule(now, until)
            if self.current is None and preempted == self.counters.preemptions:
                break
        self._seen_waiting = len(self._waiting)
        return self.current

    @property
    def unfinished(self) -> int:
        return len(self.running) + len(self._waiting)

    def waiting_jobs(self) -> list[Job]:
        """The queue, head first."""
        return list(self._waiting)

    def outputs(self, job: Job, tick: int | None = None) -> int:
        """Tokens of `job` sampled by the end of step `tick` (default: of the last step that ended)."""
        if job.id in self._decodes.jobs:
            return job.offset + (self._tick if tick is None else tick) - job.prompt_tokens + 1
        return job.outputs

    @property
    def decoding(self) -> dict[str, Job]:
        """Jobs past their first token that get one more in the step under way; read only."""
        return self._decodes.jobs

    def progress(self, now: float) -> tuple[int, float]:
        """Number and end of the last step that ended by `now`, also inside a Step of many."""
        step = self.current
        if step is None:
            return self._tick, now
        if step.steps == 1 or now < self._decodes.end(self._tick + 1):
            return self._tick, step.start
        tick = self._decodes.reach(now, self._tick)
        if self._decodes.end(tick) > now:
            tick -= 1
        tick = min(tick, self._tick + step.steps - 1)
        return tick, self._decodes.end(tick)

    def gauges(self, now: float) -> Gauges:
        """What a scrape at `now` reads: the state at the end of the last step, arrivals since then not counted."""
        step = self.current
        if step is None or step.steps == 1:
            return self._gauges
        done = self.progress(now)[0] - self._tick
        if not done:
            return self._gauges
        later = self._decodes.blocks(self._tick, done) - self._decodes.blocks(self._tick, 1)
        return Gauges(
            running=len(self.running),
            waiting=self._seen_waiting,
            deferred=self._deferred,
            kv_usage=1 - (self.pool.free - later) / self.pool.usable,
            steps=self.counters.steps + done,
            generation_tokens=self.counters.generation_tokens + done * step.decoded,
        )

    def reset_prefix_cache(self) -> bool:
        """vLLM's development call: False, and nothing done, while any block is held."""
        return self.pool.reset()

    # -- end of a step -------------------------------------------------------------------------------------------------

    def _commit(self, step: Step) -> None:
        counters, decodes, pool = self.counters, self._decodes, self.pool
        if step.steps > 1:
            pool.take(decodes.blocks(self._tick, step.steps) - decodes.blocks(self._tick, 1))
        tick = self._tick = self._tick + step.steps
        counters.steps += step.steps
        counters.generation_tokens += step.tokens
        counters.scheduled_tokens += step.prefill_tokens + step.decoded * step.steps
        for job in step.finished:
            if job.id in decodes.jobs:
                decodes.leave(job, tick)
            else:
                job.outputs += 1
            self._vacate(job)
            self._settle(job, "finished", step.end)
        for prefilled in (step.first, step.resumed):
            for job in prefilled:
                if prefilled is step.first:
                    self._queued_tokens -= job.prompt_tokens
                    counters.prompt_tokens += job.prompt_tokens
                if job.state == "running":
                    job.outputs += 1
                    decodes.enter(job, tick, self._known(job))
        for job in self._aborted:
            if job.id in decodes.jobs:
                decodes.leave(job, tick)
            elif job in self._partial:
                self._partial.remove(job)
            self._vacate(job)
            self._settle(job, "aborted", step.end)
        self._aborted.clear()
        self._gauges = Gauges(
            running=len(self.running),
            waiting=len(self._waiting) - self._unseen,
            deferred=self._deferred,
            kv_usage=1 - pool.free / pool.usable,
            steps=counters.steps,
            generation_tokens=counters.generation_tokens,
        )

    def _vacate(self, job: Job) -> None:
        """Out of the batch; its blocks go back, tail first."""
        assert job.table is not None
        del self.running[job.id]
        self.pool.release(job.table, job.chain, job.computed)
        job.table = None

    def _settle(self, job: Job, state: str, now: float) -> None:
        if state == "aborted":
            self.counters.aborted += 1
            if job.first_token_at is None:
                self._queued_tokens -= job.prompt_tokens
        else:
            self.counters.finished += 1
            job.finished_at = now
        job.state = state

    def _cut(self, now: float) -> None:
        """Shorten a Step of many to the end of the one under way at `now`."""
        step = self.current
        if step is None or step.steps == 1:
            return
        steps = self._decodes.reach(now, self._tick) - self._tick
        if steps < step.steps:
            self._decodes.unfinish(step.finished)
            step.finished = []
            step.steps = steps
            step.end = self._decodes.end(self._tick + steps)
