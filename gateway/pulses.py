"""What the streams of each replica do, counted inside the event callback and told to the core about every 50 ms.

Nothing per event reaches the core: a stream adds its gap to the replica's sums (idle or busy, by whether a prefill
is in progress there), and the tick computes how many live streams run near their own pace. Pace of a stream: time
since its first token over tokens so far, as the pacing controller was measured with. Tokens per event are learnt from
usage; where it is off from scraped counters, which also hold what came by other ways (so never both).
"""

from __future__ import annotations

from typing import Protocol

from mypy_extensions import mypyc_attr

from policies.model import Pulse, Scraped

NEAR = 0.85  # of a stream's own TPOT objective
MIN_TOKENS = 4
MEMORY = 0.1
MOST_TOKENS_PER_EVENT = 64.0


class Live(Protocol):
    """A stream after its first token."""

    tpot_s: float | None
    first_at: float
    content_events: int


@mypyc_attr(allow_interpreted_subclasses=True)
class Meter:
    """Sums of one replica since the last pulse."""

    __slots__ = (
        "_events", "_samples", "_scraped", "_told", "busy_gaps", "busy_sum_s", "events_total", "idle_gaps",
        "idle_sum_s", "live", "prefilling", "replica_id", "tokens_per_event",
    )  # fmt: skip

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.live: set[Live] = set()
        self.prefilling = False
        self.idle_gaps = self.busy_gaps = 0
        self.idle_sum_s = self.busy_sum_s = 0.0
        self.tokens_per_event = 1.0
        self._samples = 0
        self.events_total = 0  # content events of streams that ended
        self._scraped: float | None = None
        self._events = 0
        self._told = False  # usage has said it since the last scrape

    @property
    def stirred(self) -> bool:
        """Whether there is anything to pulse."""
        return bool(self.live or self.idle_gaps or self.busy_gaps)

    def pulse(self, now: float) -> Pulse:
        near = 0
        slack: float | None = None
        per_event = self.tokens_per_event
        for stream in self.live:
            objective = stream.tpot_s
            if objective is None:
                continue
            tokens = stream.content_events * per_event
            if tokens < MIN_TOKENS:
                continue
            pace = (now - stream.first_at) / tokens
            if pace > NEAR * objective:
                near += 1
            if slack is None or objective - pace < slack:
                slack = objective - pace
        idle, busy = round(self.idle_gaps * per_event), round(self.busy_gaps * per_event)  # the core thinks in tokens
        made = Pulse(len(self.live), near, slack, idle, self.idle_sum_s, busy, self.busy_sum_s)
        self.idle_gaps = self.busy_gaps = 0
        self.idle_sum_s = self.busy_sum_s = 0.0
        return made

    def ended(self, content_events: int, completion_tokens: int | None) -> None:
        """A stream is over: what it teaches about tokens per event."""
        self.events_total += content_events
        if completion_tokens and content_events > 1:
            self._learn(completion_tokens / content_events)
            self._told = True

    def scraped(self, values: Scraped) -> None:
        """Generated tokens between two scrapes over events seen between them, where enough of both moved."""
        tokens, before = values.generation_tokens, self._scraped
        seen = self.events_total + sum([s.content_events for s in self.live], 0)
        enough = seen - self._events >= 32 and not self._told
        if enough and tokens is not None and before is not None and tokens > before:
            self._learn((tokens - before) / (seen - self._events))
        self._scraped, self._events, self._told = tokens, seen, False

    def _learn(self, ratio: float) -> None:
        ratio = min(MOST_TOKENS_PER_EVENT, max(1.0, ratio))
        self._samples += 1  # the first says it all: until then streams of several tokens an event look late
        self.tokens_per_event += max(MEMORY, 1.0 / self._samples) * (ratio - self.tokens_per_event)
