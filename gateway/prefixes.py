"""The shell around prompt families: which requests are looked into, when, and where their tokens are counted.

Every admitted request with a chain costs a few dictionary lookups here. The few that are worth a look are queued with
their canonical parts (at most 256, together about 8 MB) and judged from a timer, one at a time and in steps of half a
millisecond, since whatever comes meanwhile waits for one. After a step that took t seconds of CPU the next look waits
t / cpu_share longer (after quiet times t / 0.15, for 3 s of CPU in all), so looking costs at most that share of a core
in the long run. What finds no room is counted on the next sample of its kind. No text outlives the look, unless
`samples` is on.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.prefix_journal import totals
from gateway.record import RequestRecord, TokenSource, Unmatched
from gateway.sections import Prefixes as PrefixesTable
from policies import canonical
from policies.families import Arrival, Families, Family, Sample
from policies.model import Outcome, Request
from policies.phrases import Phrases, cutting
from policies.places import path
from policies.prefix_report import report

if TYPE_CHECKING:
    from gateway.openai import Call

MOST_WAITING = 256
AHEAD = 4  # prompts that wait here while others are still sent for
MOST_WAITING_BYTES = 8 << 20
BURST_CPU_S, BURST_SHARE = 3.0, 0.15  # after quiet times, and at the start: so much CPU may be spent so fast
MOST_BODY_BYTES = 1 << 20
LEAST_WAIT_S = 0.02
STEP_S, PAUSE_S = 0.0005, 0.001  # of a look, and between two of them
AROUND = 40  # bytes on either side of a split, where samples are on
TOTALS = ("requests", "prompt", "measured_prompt", "cached", "predicted", "cacheable")
log = logging.getLogger("forebay.prefixes")


@dataclass(slots=True)
class Looked:
    """A request that is looked into, and what came of it. `ended` holds its tokens when it ended before that."""

    weight: int
    family: Family | None = None
    ended: tuple[float, ...] | None = None
    unmatched: Unmatched | None = None


@dataclass(slots=True)
class _Waiting:
    """`cut` is what its phrases come to, `steps` the cutting of the rest."""

    api: str
    document: Mapping[str, Any]
    parts: list[bytes]
    request: Request
    arrival: Arrival
    looked: Looked
    cut: Phrases = field(default_factory=Phrases)
    steps: Iterator[None] | None = None


class Prefixes(Collector):
    """One per process, on one event loop."""

    def __init__(self, settings: PrefixesTable) -> None:
        self.settings = settings
        self.families = Families(random.Random(), settings.families)
        self.models: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(TOTALS))
        self.tenants: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(TOTALS))
        self.lost: defaultdict[str, float] = defaultdict(float)  # tokens, by kind of leak
        self.cpu_s = 0.0
        self.passed_over = 0
        self._seed = secrets.randbits(63)
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._credit_s = BURST_CPU_S  # CPU time that may be spent faster than `cpu_share`
        self._credited_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._now: _Waiting | None = None  # is looked into
        self._next_at = 0.0  # when the budget allows another look
        self._since = time.monotonic()

    # -- requests ----------------------------------------------------------------------------------------------------

    def admitted(self, api: str, call: Call, parts: list[bytes], request: Request, record: RequestRecord) -> None:
        """A request with a prefix chain was let in."""
        arrival = self.arrived(request)
        record.cacheable_tokens = arrival.cacheable_tokens
        if call.document is not None and self.wants(arrival, len(call.body)):
            record.sampled = self.look(api, call.document, parts, request, arrival)

    def arrived(self, request: Request) -> Arrival:
        """Counts a request that has a chain."""
        return self.families.arrived(request.chain, request.prompt_bytes, request.prompt_tokens)

    def wants(self, arrival: Arrival, body_bytes: int) -> bool:
        """Whether `look` should follow."""
        if not arrival.wanted:
            return False
        full = len(self._waiting) >= MOST_WAITING or self._waiting_bytes > MOST_WAITING_BYTES
        if full or body_bytes > MOST_BODY_BYTES:
            self.passed_over += 1
            return False
        return True

    @property
    def busy(self) -> bool:
        """Whether what it has will take the budget's time: not worth sending a body for."""
        return len(self._waiting) >= AHEAD

    @property
    def idle(self) -> bool:
        """Whether everything is looked at."""
        return not self._waiting and self._now is None

    def look(
        self, api: str, document: Mapping[str, Any], parts: list[bytes], request: Request, arrival: Arrival
    ) -> Looked:
        """Queues its canonical parts; `document` is the body they were made of."""
        looked = Looked(arrival.stratum.take())
        self._waiting.append(_Waiting(api, document, parts, request, arrival, looked))
        self._waiting_bytes += request.prompt_bytes
        self._arm()
        return looked

    def _arm(self) -> None:
        if self._timer is None and self._waiting:
            wait_s = max(LEAST_WAIT_S, self._next_at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._look)

    def finished(self, record: RequestRecord) -> None:
        """The end of a request that was admitted here."""
        if record.outcome is not Outcome.SUCCESS:
            record.sampled = None
            return
        prompt, said = record.prompt.count or 0, record.cached
        measured = cached = 0
        if said.source is TokenSource.USAGE and said.count is not None:
            measured, cached = prompt, said.count
        predicted = 0 if record.prediction is None else record.prediction.cached_tokens
        # chunks are coarser than an engine's blocks: what was cached was cacheable
        record.cacheable_tokens = cacheable = max(cached, min(record.cacheable_tokens or 0, prompt))
        for sums in (self.models[record.model], self.tenants[record.tenant or ""]):
            sums[0] += 1
            sums[1] += prompt
            sums[2] += measured
            sums[3] += cached
            sums[4] += predicted
            sums[5] += cacheable
        if record.chain and record.completion.count and prompt:
            total_bytes = record.prompt_bytes * (prompt + record.completion.count) // prompt
            self.families.answered(record.chain, total_bytes)
        looked: Looked | None = record.sampled
        if looked is not None:
            record.unmatched = looked.unmatched
            weight = looked.weight
            weighted = tuple([weight * value for value in (1, prompt, measured, cached, predicted, cacheable)])
            if looked.family is None:
                looked.ended = weighted
            else:
                self.families.counted(looked.family, time.monotonic(), *weighted)

    # -- looking -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting.clear()
        self._waiting_bytes = 0
        self._now = None

    def _look(self) -> None:
        """One step."""
        self._timer = None
        waiting = self._now
        if waiting is None:
            waiting = self._now = self._waiting.popleft()
            self._waiting_bytes -= waiting.request.prompt_bytes
            waiting.steps = cutting(waiting.cut, waiting.parts, waiting.document, self._seed)
        begun = time.thread_time()
        try:
            over = self._step(waiting)
        except Exception:
            log.exception("a prompt of request %s could not be judged", waiting.request.id)
            over = True
        self.spent(time.thread_time() - begun)
        if over:
            self._now = None
            self._arm()
        else:
            self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self._look)

    def _step(self, waiting: _Waiting) -> bool:
        """Cuts for a while, or judges what is cut; whether it is judged."""
        if waiting.steps is None:
            self._judge(waiting)
            return True
        until = time.perf_counter() + STEP_S
        for _ in waiting.steps:
            if time.perf_counter() >= until:
                return False
        waiting.steps = None
        return False

    def spent(self, cpu_s: float) -> None:
        """CPU time that looking took, or bringing here what is looked into: the next look waits for that."""
        self.cpu_s += cpu_s
        now, share = time.monotonic(), self.settings.cpu_share
        self._credit_s = min(BURST_CPU_S, self._credit_s + share * (now - self._credited_at)) - cpu_s
        self._credited_at = now
        self._next_at = max(now, self._next_at) + cpu_s / (max(share, BURST_SHARE) if self._credit_s > 0 else share)

    def _judge(self, waiting: _Waiting) -> None:
        parts, request, looked = waiting.parts, waiting.request, waiting.looked
        stream = b"".join(parts)
        sample = Sample(
            waiting.cut,
            self._seed,
            request.adapter or request.model,
            request.tenant,
            waiting.arrival.known_bytes,
            request.prompt_tokens / max(1, request.prompt_bytes),
            text=lambda start, size: stream[start : start + size],
            path=lambda field, tool: path(waiting.api, waiting.document, parts, field, tool),
            salted=lambda field: canonical.KINDS[parts[2 * field + 1][1]] == "cache_salt",
        )
        now = time.monotonic()
        family, rows = self.families.judge(sample, looked.weight, now)
        waiting.arrival.stratum.leaky |= bool(rows)
        for row, tokens in rows:
            self.lost[row.kind] += tokens
            if self.settings.samples:
                row.around = stream[max(0, row.start - AROUND) : row.start + AROUND].decode("utf-8", "replace")
        if rows:
            first, lost = rows[0]
            looked.unmatched = Unmatched(first.kind, first.path, first.start, family.id, round(lost), looked.weight)
        looked.family = family
        if looked.ended is not None:
            self.families.counted(family, now, *looked.ended)

    # -- telling -----------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Everything `forebay prefixes` and the live page show."""
        now = time.monotonic()
        return {
            "since_s": round(now - self._since, 1),
            "models": {name or "-": totals(sums) for name, sums in self.models.items()},
            "tenants": {name or "-": totals(sums) for name, sums in self.tenants.items()},
            **report(self.families, now),
            "passed_over": self.passed_over,
            "cpu_s": round(self.cpu_s, 4),
        }

    def collect(self) -> Iterator[Metric]:
        """Labels: models and tenants that the gateway serves, kinds of leaks; a family is never a label."""
        for label, by_name in (("model", self.models), ("tenant", self.tenants)):
            family = CounterMetricFamily(
                f"forebay_prefix_{label}_tokens",
                "Prompt tokens of good ends: all, of known cached part, cached, believed cached, in an endless cache.",
                labels=(label, "of"),
            )
            for name, sums in by_name.items():
                for of, value in zip(TOTALS[1:], sums[1:], strict=True):
                    family.add_metric([name, of], value)
            yield family
        lost = CounterMetricFamily(
            "forebay_prefix_lost_tokens", "Prompt tokens not shared because of a leak, estimated.", labels=("leak",)
        )
        for kind, tokens in self.lost.items():
            lost.add_metric([kind], tokens)
        yield lost
        yield CounterMetricFamily("forebay_prefix_samples", "Prompts looked into.", value=self.families.samples)
        yield CounterMetricFamily("forebay_prefix_cpu_seconds", "CPU time that took.", value=self.cpu_s)
        families = float(len(self.families.families))
        yield GaugeMetricFamily("forebay_prefix_families", "Prompt families known.", value=families)


def mount(app: FastAPI, prefixes: Prefixes | None) -> None:
    """Adds its path to the control plane."""

    @app.get("/admin/prefixes")
    async def families() -> Response:
        """Prompt families, their reuse against its ceiling, and what keeps their prompts from being shared."""
        if prefixes is None:
            return JSONResponse({"errors": ["prefixes.enabled is false: no prompt family is looked for"]}, 404)
        return JSONResponse(prefixes.report())
