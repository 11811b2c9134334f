"""One simulated replica with what its gateways see of it: live streams, gaps between events, scrapes.

The engine runs many decode-only steps as one; the gaps its streams saw are counted from its step numbers whenever
somebody looks, so nothing is done per token. The longest gap of a stream is the longest step since its first token:
a stack of (end, duration) with falling durations answers that in O(log n).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from loadtests.engine import Engine, EngineConfig, Job
from loadtests.record import Record
from loadtests.schedule import Row
from policies.core import Balancer
from policies.model import Pulse, Request, Scraped

NEAR = 0.85  # of the TPOT objective
FEW_TOKENS = 4  # below this a running mean says nothing


@dataclass(slots=True, eq=False)
class Flight:
    """One logical request under way; the fields below `attempts` are of its present attempt."""

    row: Row
    record: Record
    request: Request
    gateway: int
    attempts: int = 0
    replica: SimReplica | None = None  # None: held by the gateway
    job: Job | None = None
    first_at: float | None = None
    stalled_at: float | None = None  # last token before a preemption
    gap_s: float = 0.0  # longest stall
    over: bool = False
    began_at: float = 0.0  # first token, again
    objective_s: float = inf  # of TPOT; none is endless
    near_s: float = inf  # mean seconds per token above which the stream counts as near its objective
    check_at: float = inf  # not near before

    def start(self, now: float) -> None:
        """Its first token."""
        self.first_at = self.began_at = self.record.first_s = now
        if self.request.tpot_s is not None:
            self.objective_s = self.request.tpot_s
            self.near_s = NEAR * self.request.tpot_s
            self.check_at = now + self.near_s * FEW_TOKENS


@dataclass(slots=True)
class Gaps:
    """Between events since the last pulse, by whether the gateway saw a prefill under way."""

    idle: int = 0
    idle_s: float = 0.0
    busy: int = 0
    busy_s: float = 0.0


@dataclass(eq=False)
class SimReplica:
    """Identity, engine and streams. `live` and `gaps` are per gateway."""

    id: str
    config: EngineConfig
    gateways: int
    started_at: float = 0.0
    alive: bool = True
    engine: Engine = field(init=False)
    live: list[dict[str, Flight]] = field(init=False)
    gaps: list[Gaps] = field(init=False)
    open: dict[str, Flight] = field(default_factory=dict)  # attempts under way, by request id
    event_end: float | None = None  # end of the step whose event is in the heap
    queue_max: int = 0
    past: list[Engine] = field(default_factory=list)  # engines before a restart
    jobs: list[Job] = field(default_factory=list)  # of the present engine

    def __post_init__(self) -> None:
        self.engine = Engine(self.config)
        self.live = [{} for _ in range(self.gateways)]
        self.gaps = [Gaps() for _ in range(self.gateways)]
        self._ends: list[float] = []
        self._durations: list[float] = []
        self._seen_tick = 0
        self._seen_at = 0.0

    def wake_up(self, now: float) -> None:
        """Start stepping after an idle time; what came before is no gap."""
        self._seen_tick = self.engine.progress(now)[0]
        self._seen_at = now
        self.engine.step(now, inf)

    def account(self, now: float, cores: Sequence[Balancer]) -> int:
        """Count the gaps of all steps that have ended by `now`; answers the number of the last one."""
        tick, end = self.engine.progress(now)
        steps = tick - self._seen_tick
        if steps <= 0:
            return tick
        lasted = end - self._seen_at
        each = lasted / steps
        for streams, gaps, core in zip(self.live, self.gaps, cores, strict=True):
            count = len(streams)
            if not count:
                continue
            if core.prefilling(self.id):
                gaps.busy += count * steps
                gaps.busy_s += count * lasted
            else:
                gaps.idle += count * steps
                gaps.idle_s += count * lasted
        ends, durations = self._ends, self._durations
        while durations and durations[-1] <= each:
            durations.pop()
            ends.pop()
        ends.append(end)
        durations.append(each)
        self._seen_tick, self._seen_at = tick, end
        return tick

    def longest_gap_s(self, since: float) -> float:
        """Longest step that ended after `since`."""
        at = bisect_right(self._ends, since)
        return self._durations[at] if at < len(self._durations) else 0.0

    def pulse(self, gateway: int, now: float, tick: int) -> Pulse:
        """What this gateway's streams did since the last pulse; `tick` is what `account` answered.

        The least slack is told where a stream is near its objective. A stream is looked at only when it can be.
        """
        gaps, self.gaps[gateway] = self.gaps[gateway], Gaps()
        near, slack = 0, inf
        streams = self.live[gateway]
        for flight in streams.values():
            if now < flight.check_at:
                continue
            job = flight.job
            assert job is not None
            tokens = job.offset + tick - job.prompt_tokens + 1 if job.finish_tick >= 0 else job.outputs
            lasted = now - flight.began_at
            if tokens >= FEW_TOKENS and lasted > flight.near_s * tokens:
                near += 1
                slack = min(slack, flight.objective_s - lasted / tokens)
            else:  # even without another token it cannot be near before this
                flight.check_at = flight.began_at + flight.near_s * max(tokens, FEW_TOKENS)
        least = slack if slack < inf else None
        return Pulse(len(streams), near, least, gaps.idle, gaps.idle_s, gaps.busy, gaps.busy_s)

    def scrape(self, values_at: float, read_at: float) -> Scraped:
        """What `/metrics` shows; the gauges are of the end of the engine's last step."""
        gauges, counters = self.engine.gauges(values_at), self.engine.counters
        self.queue_max = max(self.queue_max, gauges.waiting)
        return Scraped(
            replica_id=self.id,
            at=read_at,
            running=gauges.running,
            waiting=gauges.waiting,
            kv_usage=gauges.kv_usage,
            num_gpu_blocks=self.engine.pool.usable + 1,
            block_size=self.engine.block,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=gauges.generation_tokens,
            preemptions=counters.preemptions,
            iterations=gauges.steps,
            started_at=self.started_at,
            adapters_running=tuple(sorted({j.adapter for j in self.engine.running.values() if j.adapter})),
            max_adapters=self.config.max_loras or None,
        )

    def restart(self, now: float) -> None:
        """A new process with an empty cache. The caller has failed its attempts."""
        self.past.append(self.engine)
        self.jobs = []
        self.engine = Engine(self.config)
        self._seen_tick, self._seen_at = 0, now
        self.started_at = now
        self.event_end = None

    @property
    def adapter_loads(self) -> int:
        return sum(e.counters.adapter_loads for e in (*self.past, self.engine))

    @property
    def preemptions(self) -> int:
        return sum(e.counters.preemptions for e in (*self.past, self.engine))
