"""What became of one logical request, as the client saw it. One per schedule row, whatever its attempts.

Times are seconds from the start of the window, in the clock of the schedule. TTFT and E2E count from the
scheduled time, so that a generator that falls behind can only make a result worse; `lag_s` shows by how much.
Partition: exactly one of the closed set for each row. An answer that is complete but misses an objective is late
and keeps its times; everything else that failed has a reason beside it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from loadtests.answer import Answer
from loadtests.schedule import Row
from policies.objectives import Objectives, Partition, Timing, judge

ERRORS = (Partition.ERROR_HTTP, Partition.ERROR_TRANSPORT, Partition.TRUNCATED)  # what tables call errors
MOST_MESSAGE = 200  # characters


@dataclass(slots=True)
class Record:
    id: int
    session: str | None = None
    turn: int = 0
    service_class: str = ""
    prompt_tokens: int = 0  # of the schedule
    output_tokens: int = 0  # of the schedule
    counted: bool = True  # in the cohort; warm-up and cool-down rows are not
    scheduled_s: float | None = None  # None: a later turn that never became due
    dispatched_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    end_s: float | None = None
    completion_tokens: int | None = None
    served_prompt_tokens: int | None = None  # as the replica counted them
    cached_tokens: int | None = None  # None: not reported, never 0
    longest_gap_s: float = 0.0
    content_events: int = 0
    partition: Partition = Partition.NOT_DISPATCHED
    complete: bool = False
    reason: str = ""
    message: str | None = None  # what the server said beside the code that is the reason
    http: int | None = None
    attempts: int = 0  # of the client; those of a gateway are in its own records
    wasted_tokens: int = 0  # tokens or events of attempts that did not become the answer
    replica: str | None = None
    queue_s: float | None = None  # in the gateway, as it says
    engine: dict[str, float] | None = None  # vLLM's own per-request figures, ms
    text: str | None = None  # only where an answer check asked for it

    @classmethod
    def of(cls, row: Row, counted: bool) -> Record:
        return cls(row.id, row.session, row.turn, row.service_class, row.prompt_tokens, row.output_tokens, counted)

    @property
    def lag_s(self) -> float | None:
        """Lateness of the generator itself."""
        return None if self.dispatched_s is None or self.scheduled_s is None else self.dispatched_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None or self.scheduled_s is None else self.first_s - self.scheduled_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.end_s is None or self.scheduled_s is None else self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None for one token or none."""
        if self.first_s is None or self.last_s is None or (self.completion_tokens or 0) < 2:
            return None
        return (self.last_s - self.first_s) / ((self.completion_tokens or 0) - 1)

    def read(self, answer: Answer) -> None:
        """Takes over what the last attempt showed."""
        self.http = answer.status
        self.first_s, self.last_s, self.end_s = answer.first_content_at, answer.last_content_at, answer.ended_at
        if not answer.streamed:
            self.first_s = self.last_s = None  # the whole body came at once: no TTFT, no pace
        self.completion_tokens = answer.completion_tokens
        self.served_prompt_tokens, self.cached_tokens = answer.prompt_tokens, answer.cached_tokens
        self.longest_gap_s, self.content_events = answer.longest_gap_s, answer.content_events
        self.engine = answer.engine_metrics
        if answer.text:
            self.text = "".join(answer.text)

    def settle(self, answer: Answer, objectives: Objectives) -> None:
        """The verdict of an attempt that ran to its own end, good or bad."""
        fault = answer.fault()
        if fault is not None:
            self.partition, self.reason = fault
            self.message = answer.error_message and answer.error_message[:MOST_MESSAGE]
            return
        start, ended = self.scheduled_s, answer.ended_at
        assert start is not None
        assert ended is not None
        self.complete = True
        first, last = answer.first_content_at, answer.last_content_at
        self.partition = judge(
            Timing(
                None if first is None else first - start,
                None if last is None else last - start,
                ended - start,
                answer.output_tokens,
                answer.longest_gap_s,
                answer.streamed,
                answer.generates,
            ),
            objectives,
        )

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Record:
        known = {f.name for f in fields(cls)}
        record = cls(**{name: v for name, v in value.items() if name in known})
        record.partition = Partition(record.partition)
        return record
