"""The end of a request: its outcome, its tokens with their source, its verdict.

TTFT runs from receipt of the full request to the first content event written; gaps are between content events; E2E
ends with the last byte. Tokens come from usage where the replica gave it, else from content events times what is
known of its tokens per event. The TTFT objective grows with the prompt: it is resolved again once
the true length is known.
"""

from __future__ import annotations

from gateway.endpoints import Kind
from gateway.record import RequestRecord, Tokens, TokenSource
from policies.model import Outcome, Request, ServiceClass, Usage
from policies.objectives import Objectives, Partition, judge

_PARTITIONS = {
    Outcome.CLIENT_ERROR: Partition.ERROR_HTTP,
    Outcome.CANCELLED: Partition.ABANDONED,
    Outcome.SHED: Partition.REJECTED,
    Outcome.EXPIRED: Partition.SLOW_E2E,
    Outcome.BACKPRESSURE: Partition.REJECTED,
    Outcome.TRUNCATED: Partition.TRUNCATED,
}
TRANSPORT = frozenset(
    {"refused", "connect_timeout", "reset", "early_end", "protocol", "first_event_timeout", "idle_timeout"}
)


def objectives(
    request: Request, service_class: ServiceClass, asked_ttft_s: float | None, prompt_tokens: int | None = None
) -> Objectives:
    """The bounds of a request relative to its receipt; `prompt_tokens` None: the estimate."""
    ttft = service_class.ttft_s
    if ttft is not None:
        tokens = request.prompt_tokens if prompt_tokens is None else prompt_tokens
        ttft += service_class.ttft_s_per_token * tokens
    if asked_ttft_s is not None:
        ttft = asked_ttft_s if ttft is None else min(ttft, asked_ttft_s)
    deadline = None if request.deadline is None else request.deadline - request.received_at
    return Objectives(ttft, request.tpot_s, request.itl_s, deadline)


def tokens(record: RequestRecord, usage: Usage | None, tokens_per_event: float, estimate: int) -> None:
    """Fills the three token counts with the best source there is."""
    prompt = None if usage is None else usage.prompt_tokens
    record.prompt = Tokens(estimate) if prompt is None else Tokens(prompt, TokenSource.USAGE)
    completion = None if usage is None else usage.completion_tokens
    if completion is not None:
        record.completion = Tokens(completion, TokenSource.USAGE)
    elif record.content_events:
        count = max(record.content_events, round(record.content_events * tokens_per_event))
        record.completion = Tokens(count, TokenSource.EVENTS)
    else:
        record.completion = Tokens(0 if record.kind is Kind.GENERATE else None, TokenSource.EVENTS)
    if usage is not None and usage.cached_tokens is not None:
        record.cached = Tokens(usage.cached_tokens, TokenSource.USAGE)
    elif record.prediction is not None:
        record.cached = Tokens(record.prediction.cached_tokens)


def partition(record: RequestRecord) -> Partition:
    """Where a finished record counts. Its outcome and end must be set."""
    outcome = record.outcome
    if outcome is Outcome.SUCCESS:
        return judge(record.timing(), record.objectives)
    if outcome is Outcome.ERROR or outcome is None:
        return Partition.ERROR_TRANSPORT if record.reason in TRANSPORT else Partition.ERROR_HTTP
    return _PARTITIONS[outcome]
