"""Which tokens go into the next step: the scheduler of vLLM V1, over `blocks.py` and `batch.py`.

1. Running jobs in order of admission: one token when decoding, the rest of the prompt when not, within the token
   budget.
2. A job whose blocks do not fit preempts the last of running (priority policy: the worst), until they fit or it is
   itself out; a preempted job goes to the front of the queue and is computed again, its answer included, less what is
   cached.
3. If nobody was preempted: the queue's head, while budget and sequences last: prefix lookup (at most target - 1
   tokens, whole blocks), the whole prompt must fit in free blocks though only a chunk is scheduled; if it does not,
   nobody passes it (but a job that only lacks a LoRA slot is passed).
The first rule costs O(1) as long as everything fits, which is nearly always; only a shortage walks the batch.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from math import inf

from loadtests.batch import Decodes, Job, Step
from loadtests.blocks import BlockPool
from loadtests.profiles import PROFILES, Profile


@dataclass(slots=True, frozen=True)
class EngineConfig:
    """vLLM's own settings under vLLM's own names; None takes the profile's value."""

    profile: Profile = PROFILES["a100-8b"]
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None  # default: what the KV cache holds, at most 131 072
    num_blocks: int | None = None
    block_size: int | None = None
    unit_tokens: int | None = None  # tokens per id of a job's chain; a multiple of the block
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"  # or priority: lower value first, then arrival
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    async_scheduling: bool = True  # step k+1 is made up while k runs: an arrival waits up to two steps
    max_loras: int = 0  # adapters in one batch; 0: no LoRA
    lora_load_s: float = 0.0  # added to the step that loads one
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None


@dataclass(slots=True)
class Counters:
    steps: int = 0
    scheduled_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    adapter_loads: int = 0
    finished: int = 0
    aborted: int = 0
    rejected: dict[str, int] = field(default_factory=lambda: {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0})


class Scheduler:
    """State of one engine and the making up of its steps; `Engine` is its face."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        profile = self.profile = config.profile
        self.budget = config.max_num_batched_tokens or profile.max_num_batched_tokens
        self.max_seqs = config.max_num_seqs or profile.max_num_seqs
        if self.max_seqs > self.budget:
            raise ValueError(f"max_num_seqs {self.max_seqs} must not exceed max_num_batched_tokens {self.budget}")
        if config.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(f"scheduling_policy {config.scheduling_policy!r} must be fcfs or priority")
        self.block = config.block_size or profile.block_size
        self.pool = BlockPool(
            config.num_blocks or profile.num_blocks, self.block, config.unit_tokens, config.enable_prefix_caching
        )
        self.unit_tokens = config.unit_tokens or self.block
        capacity = self.pool.usable * self.block
        self.max_model_len = config.max_model_len or min(131_072, capacity)
        if self.max_model_len > capacity:
            raise ValueError(f"max_model_len {self.max_model_len} exceeds the KV cache of {capacity} tokens")
        self.counters = Counters()
        self.current: Step | None = None  # the step under way
        self.running: dict[str, Job] = {}  # in order of admission
        self.adapters: dict[str, None] = {}  # loaded, least recently used first
        self._decodes = Decodes(self.block)
        self._partial: list[Job] = []  # running, prompt not yet computed
        self._waiting: deque[Job] = deque()  # a heap under the priority policy
        self._deferred = 0  # waiting only for a LoRA slot
        self._aborted: list[Job] = []
        self._priority = config.scheduling_policy == "priority"
        self._watermark = int(config.watermark * (self.pool.usable + 1))
        self._serial = 0
        self._private = 0  # ids for answers of preempted requests, below all others
        self._tick = 0  # steps that have ended
        self._queued_tokens = 0  # prompt tokens of requests without a first token
        self._threshold = config.long_prefill_token_threshold
        self._chunk_context = 0.0
        self._loading_s = 0.0

    # -- making up a step ----------------------------------------------------------------------------------------------

    def _schedule(self, now: float, until: float | None) -> Step | None:
        tick, pool, decodes = self._tick + 1, self.pool, self._decodes
        step = Step(now)
        self._chunk_context = 0.0
        self._loading_s = 0.0
        step.decoded = len(decodes.jobs)
        blocks = decodes.grow[tick % self.block]
        job = self._partial[0] if self._partial else None
        chunk = extra = 0
        if job is not None:
            chunk = min(job.target - job.computed, self.budget - step.decoded)
            extra = self._blocks(job.computed + chunk) - self._blocks(job.computed)
        if blocks + extra <= pool.free and not (job and (len(self._partial) > 1 or self._threshold)):
            pool.take(blocks + extra)
            if job is not None and chunk:
                self._compute(job, chunk, step)
            budget = self.budget - step.decoded - chunk
        else:
            budget = self._schedule_running(step, tick)
        stuck = not self._waiting
        self._deferred = 0
        if self._waiting and not step.preempted:
            stuck = self._admit(step, tick, budget)
        if step.prefill_tokens:
            context = decodes.offsets - sum(job.offset for job in step.skipped) + step.decoded * tick
            sequences = step.decoded + len(step.first) + len(step.resumed)
            tokens = step.decoded + step.prefill_tokens
            step.end = now + self._loading_s + self.profile.step_s(tokens, sequences, context, self._chunk_context)
            decodes.disturb()
            for job in step.first:
                job.first_token_at = step.end
        elif step.decoded:
            decodes.begin(self.profile, now, tick - 1)
            if until is not None and stuck and not step.preempted:
                finish = decodes.next_finish()
                assert finish is not None
                most = min(finish, decodes.reach(until, tick - 1)) - (tick - 1) if until < inf else finish - (tick - 1)
                step.steps = decodes.affordable(tick - 1, pool.free + blocks, most)
            step.end = decodes.end(tick - 1 + step.steps)
        else:
            self._tick += bool(step.skipped)  # an empty step: the first of running preempted itself
            return None
        step.finished = decodes.finishing(tick - 1 + step.steps)
        for prefilled in (step.first, step.resumed):
            step.finished += [job for job in prefilled if job.outputs + 1 == job.output_tokens]
        return step

    def _compute(self, job: Job, tokens: int, step: Step) -> None:
        """Schedule `tokens` of the job's prompt, blocks being there; they can be hit from now on."""
        assert job.table is not None
        self._chunk_context += tokens * (job.computed + tokens / 2)
        job.computed += tokens
        step.prefill_tokens += tokens
        self.pool.fill(job.table, job.chain, job.computed // self.block)
        if job.computed == job.target:
            if job in self._partial:
                self._partial.remove(job)
            (step.resumed if job.outputs else step.first).append(job)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def _enqueue(self, job: Job, front: bool) -> None:
        if self._priority:
            insort(self._waiting, job, key=_urgency)
        elif front:
            self._waiting.appendleft(job)
        else:
            self._waiting.append(job)

    def _admit(self, step: Step, tick: int, budget: int) -> bool:
        """Rule 3. True when what still waits cannot start before the composition of the batch changes."""
        passed: list[Job] = []
        waiting, pool = self._waiting, self.pool
        stuck = True
        while waiting and budget > 0 and len(self.running) < self.max_seqs:
            job = waiting[0]
            if job.ready > tick and self.running:
                stuck = False
                break
            if job.adapter is not None and not self._adapter_room(job.adapter):
                passed.append(waiting.popleft())
                continue
            if self._decodes.known:
                self._publish(tick)
            found = pool.match(job.chain, (job.target - 1) // self.block)
            hit = found.blocks * self.block
            tokens = min(job.target - hit, budget)
            if self._threshold and (self.running or len(waiting) > 1):
                tokens = min(tokens, self._threshold)
            must_fit = job.target if self.config.scheduler_reserve_full_isl else hit + tokens
            wanted = self._blocks(must_fit) - found.blocks + found.idle
            if wanted + (self._watermark if self.running else 0) > pool.free:
                break
            waiting.popleft()
            self._serial += 1
            job.serial = self._serial
            job.state = "running"
            job.computed = hit
            if job.admitted_at is None:
                job.admitted_at = step.start
                job.cached_tokens = hit
                self.counters.prefix_queries += job.target
                self.counters.prefix_hits += hit
            if job.adapter is not None:
                self._load(job.adapter)
            self.running[job.id] = job
            job.table = pool.claim(found)
            pool.take(self._blocks(hit + tokens) - found.blocks)
            self._partial.append(job)
            self._compute(job, tokens, step)
            budget -= tokens
        waiting.extendleft(reversed(passed))
        self._deferred = len(passed)
        return stuck

    def _known(self, job: Job) -> bool:
        return len(job.chain) * self.unit_tokens > job.prompt_tokens

    def _publish(self, tick: int) -> None:
        """Enter what decoding jobs have filled since the last lookup: kept until somebody looks."""
        for job in self._decodes.known.values():
            assert job.table is not None
            self.pool.fill(job.table, job.chain, (job.offset + tick) // self.block)

    def _adapter_room(self, adapter: str) -> bool:
        used = {job.adapter for job in self.running.values() if job.adapter is not None}
        return adapter in used or len(used) < self.config.max_loras

    def _load(self, adapter: str) -> None:
        """Into a LoRA slot, in place of the least recently used adapter that no running job needs."""
        if self.adapters.pop(adapter, 0) == 0:
            self._loading_s += self.config.lora_load_s
            self.counters.adapter_loads += 1
            if len(self.adapters) >= self.config.max_loras:
                used = {job.adapter for job in self.running.values()}
                del self.adapters[next(name for name in self.adapters if name not in used)]
        self.adapters[adapter] = None

    def _schedule_running(self, step: Step, tick: int) -> int:
        """Rules 1 and 2 job by job, for when blocks or the order within the budget matter. Returns the budget left."""
        budget, decodes, pool = self.budget, self._decodes, self.pool
        scheduled: dict[Job, int] = {}
        for job in list(self.running.values()):
            if job.state != "running":
                continue
            if budget <= 0:
                break
            if job.id in decodes.jobs:
                before, tokens = job.offset + tick - 1, 1
            else:
                before, tokens = job.computed, min(job.target - job.computed, budget)
                if self._threshold and len(self.running) + len(self._waiting) > 1:
                    tokens = min(tokens, self._threshold)
            wanted = self._blocks(before + tokens) - self._blocks(before)
            while pool.free < wanted and job.state == "running":
                victim = (
                    max(self.running.values(), key=_urgency)
                    if self._priority
                    else next(reversed(self.running.values()))
                )
                budget += scheduled.get(victim, 0)
                self._preempt(victim, step, tick - 1, scheduled.pop(victim, 0))
            if job.state != "running":
                break
            pool.take(wanted)
            scheduled[job] = tokens
            budget -= tokens
            if job.id not in decodes.jobs:
                self._compute(job, tokens, step)
        for job in list(decodes.jobs.values()):
            if job not in scheduled:
                step.skipped.append(job)
                decodes.leave(job, tick - 1)
                decodes.enter(job, tick, self._known(job))
        step.decoded = len(decodes.jobs) - len(step.skipped)
        return budget

    def _preempt(self, job: Job, step: Step, tick: int, scheduled: int) -> None:
        """All blocks back (they stay cached), to be computed again from the front of the queue."""
        self._publish(tick)  # equal answers that go on come first in the index, as they were filled first
        if job.id in self._decodes.jobs:
            self._decodes.leave(job, tick)
            job.computed += scheduled
        else:
            step.prefill_tokens -= scheduled
            for some in (self._partial, step.first, step.resumed):
                if job in some:
                    some.remove(job)
        chain = list(job.chain)
        while len(chain) * self.unit_tokens < job.computed:
            self._private -= 1
            chain.append(self._private)
        job.chain = chain
        assert job.table is not None
        self.pool.release(job.table, chain, job.computed)
        job.table = None
        del self.running[job.id]
        job.state = "waiting"
        job.computed = 0
        job.target = job.prompt_tokens + job.outputs
        job.preemptions += 1
        self.counters.preemptions += 1
        step.preempted.append(job)
        self._enqueue(job, front=True)


def _urgency(job: Job) -> tuple[int, int]:
    """Order of the priority policy: smallest first in, largest first out."""
    return job.priority, job.arrival
