"""What ended lately: enough of each request for the rates and percentiles of the last minute, and of those that went
wrong the whole record. Fed once per request with one tuple; everything else is computed when somebody looks.

Bounded: the last `MOST_ENDED` ends (at high rates the window is shorter and says so), the last `MOST_SHED` refusals and
`MOST_LATE` late or failed requests. Records hold no prompt text; samples, where they are on, are dropped here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from gateway.record import RequestRecord, Tokens
from policies.model import Outcome
from policies.objectives import Objectives, Partition, tpot_s

MOST_ENDED = 4_096
MOST_SHED = MOST_LATE = 30
WINDOW_S = 60.0
_QUIET = frozenset({Partition.GOOD, Partition.ABANDONED, None})


class Ended(NamedTuple):
    """References to what a record had at its end; times are monotonic seconds."""

    ended_at: float
    service_class: str
    partition: Partition | None
    received_at: float
    first_content_at: float | None
    last_content_at: float | None
    objectives: Objectives
    replica_id: str | None
    prompt: Tokens
    completion: Tokens
    cached: Tokens

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_content_at is None else self.first_content_at - self.received_at

    @property
    def tpot_s(self) -> float | None:
        return tpot_s(self.first_content_at, self.last_content_at, self.completion.count)


class Recent:
    """One per gateway."""

    def __init__(self) -> None:
        self._ended: deque[tuple[Any, ...]] = deque(maxlen=MOST_ENDED)  # each becomes an `Ended` when it is looked at
        self._shed: deque[RequestRecord] = deque(maxlen=MOST_SHED)
        self._late: deque[RequestRecord] = deque(maxlen=MOST_LATE)

    def add(self, r: RequestRecord) -> None:
        """A request is over."""
        attempts = r.attempts
        self._ended.append(
            (
                r.ended_at or r.received_at, r.service_class, r.partition, r.received_at, r.first_content_at,
                r.last_content_at, r.objectives, attempts[-1].replica_id if attempts else None, r.prompt, r.completion,
                r.cached,
            )
        )  # fmt: skip
        if r.partition not in _QUIET and r.outcome is not Outcome.CLIENT_ERROR:
            (self._shed if r.partition is Partition.REJECTED else self._late).append(r)

    def window(self, now: float) -> tuple[list[Ended], float]:
        """What ended in the last minute, and how many seconds that covers."""
        rows = [Ended(*row) for row in self._ended if now - row[0] <= WINDOW_S]
        if len(rows) < MOST_ENDED:
            return rows, WINDOW_S
        return rows, max(0.001, now - min(row.ended_at for row in rows))

    def notable(self) -> Iterator[RequestRecord]:
        """Refused, late and failed requests, the last first."""
        rows = sorted((*self._shed, *self._late), key=lambda r: -(r.ended_at or r.received_at))
        yield from rows


def told(record: RequestRecord, now: float) -> dict[str, Any]:
    """One such request as the live page shows it: what was asked, decided and seen; never its text."""
    objectives, prediction = record.objectives, record.prediction
    return {
        "request_id": record.request_id,
        "ago_s": round(now - (record.ended_at or record.received_at), 1),
        "service_class": record.service_class,
        "tenant": record.tenant,
        "model": record.model,
        "partition": None if record.partition is None else record.partition.value,
        "reason": record.reason,
        "status": record.status,
        "replicas": [attempt.replica_id for attempt in record.attempts],
        "choice": record.choice_reason,
        "prompt_bytes": record.prompt_bytes,
        "prompt_tokens": record.prompt.count,
        "cached_tokens": record.cached.count,
        "completion_tokens": record.completion.count,
        "queue_wait_s": _round(record.queue_wait_s),
        "ttft_s": _round(record.ttft_s),
        "tpot_s": _round(record.tpot_s),
        "longest_gap_s": _round(record.longest_gap_s or None),
        "e2e_s": _round(record.e2e_s),
        "ttft_objective_s": _round(objectives.ttft_s),
        "tpot_objective_s": _round(objectives.tpot_s),
        "predicted_ttft_s": None if prediction is None else _round(prediction.ttft_s),
        "alternatives": [
            {
                "replica_id": other.replica_id,
                "score": _round(other.score),
                "predicted_ttft_s": _round(other.predicted_ttft_s),
                "cached_tokens": other.cached_tokens,
            }
            for other in record.alternatives
        ],
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
