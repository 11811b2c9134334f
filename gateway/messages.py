"""What hands and the core say to each other, and how requests, decisions and records look on the way.

Only what decides travels: hashes of the prompt, sizes, class, tenant, deadlines; and the body of the few prompts that
the core wants to look into (`prefixes.py`). Times are monotonic seconds, which all processes of one host share. Of a
finished request the core knows the request and its last decision already, so only what the hand saw comes back. The
arrays are positional: both sides are of one release, since a supervisor never mixes two.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from operator import attrgetter
from typing import Any

from gateway.record import Attempt, RequestRecord, Tokens, TokenSource, Unmatched
from policies.model import Abort, Decision, Dispatch, Hold, Outcome, Prediction, Request, Shed, Usage
from policies.objectives import Objectives, Partition


class To(IntEnum):
    """First element of a message."""

    # a hand tells the core
    HELLO = 0  # slot, pid, configuration number, its document, view of the fleet, what the core before had learnt
    SUBMIT = 1  # id, request, title
    FIRST = 2  # id
    FAILED = 3  # id, outcome
    COMPLETE = 4  # id, outcome, usage, replica, what the hand saw or None
    PULSE = 5  # replica, events, and a Pulse
    SIGN = 6  # replica, sign
    RECORD = 7  # what the hand saw, and the request that the core never had
    ASK = 8  # number, scope, body: a request for the control plane
    STATE = 9  # a mapping, once a second
    MADE = 10  # response id, replica (both ways)
    ADOPT = 11  # id, request, title, replica, dispatched at, started
    KEEP = 12  # id, replica: it began to answer before the order to take it back came
    BODY = 13  # id, api, body of a prompt that the core asked to look into
    # the core tells a hand
    WELCOME = 20  # reads_prefix
    DISPATCH = 21  # id, replica, reason, prediction
    HOLD = 22  # id
    SHED = 23  # id, reason, retry_after_s
    ABORT = 24  # id, reason, requeue
    PREFILL = 25  # replica, whether a prefill is in progress there
    FLEET = 26  # view of the fleet
    CONFIG = 27  # number, document, reads_prefix
    ANSWER = 28  # number, status, headers, body
    GIVE_UP = 29  # replica whose engine hangs
    LAG = 30  # smoothed lag of the core's loop
    METER = 31  # replica, tokens per event
    LOOK = 32  # id: its body, please, while it is still there
    LEARNT = 33  # what the core has learnt, for the one after it


_REQUEST = (
    "model", "adapter", "tenant", "session", "service_class", "arm", "received_at", "ttft_deadline", "tpot_s", "itl_s",
    "deadline", "prompt_bytes", "prompt_tokens", "chain", "expected_tokens", "max_tokens", "streams", "generates",
    "shared_depth", "tenant_weight", "pinned",
)  # fmt: skip
_SEEN = (
    "request_id", "received_unix", "endpoint", "kind", "prompt", "completion", "cached", "objectives", "client_retry",
    "committed_at", "first_content_at", "last_content_at", "longest_gap_s", "content_events", "ended_at", "status",
    "outcome", "partition", "reason", "unmatched",
)  # fmt: skip
_OF_REQUEST = (
    "received_at", "model", "adapter", "tenant", "session", "service_class", "arm", "streams", "prompt_bytes", "chain",
)  # fmt: skip
_TITLE = ("request_id", "received_unix", "endpoint", "kind")  # what it is called where the core writes of it
_of_request = attrgetter(*_REQUEST)
title = attrgetter(*_TITLE)  # of a record
_seen = attrgetter(*_SEEN)
_shared = attrgetter(*_OF_REQUEST)


def of_request(request: Request) -> Sequence[Any]:
    """Everything but its id and its text, which stays where the body is."""
    values: Sequence[Any] = _of_request(request)
    return values


def request(id: str, values: Sequence[Any], text: str | None = None) -> Request:
    made = Request(id, *values[:6], *values[6:13])
    (
        chain, made.expected_tokens, made.max_tokens, made.streams, made.generates, made.shared_depth,
        made.tenant_weight, made.pinned,
    ) = values[13:21]  # fmt: skip
    made.chain = tuple(chain)
    if text is not None:
        made.text = lambda: text
    return made


def titled(values: Sequence[Any], request: Request) -> RequestRecord:
    """The beginnings of a record: what the core knows of a request that a hand has."""
    made = RequestRecord(values[0], request.received_at)
    made.received_unix, made.endpoint, made.kind = values[1:]
    for name, value in zip(_OF_REQUEST, _shared(request), strict=True):
        setattr(made, name, value)
    made.prompt = Tokens(request.prompt_tokens)
    return made


# -- decisions -----------------------------------------------------------------------------------------------------


def of_decision(id: str, decision: Decision) -> list[Any]:
    if isinstance(decision, Dispatch):
        said = decision.prediction
        predicted = (
            None
            if said is None
            else (said.ttft_s, said.tpot_s, said.uncached_tokens, said.cached_tokens, said.scraped_age_s)
        )
        return [To.DISPATCH, id, decision.replica_id, decision.reason, predicted]
    if isinstance(decision, Hold):
        return [To.HOLD, id]
    if isinstance(decision, Shed):
        return [To.SHED, id, decision.reason, decision.retry_after_s, decision.predicted_ttft_s]
    return [To.ABORT, id, decision.reason, decision.requeue]


def decision(message: Sequence[Any]) -> Decision:
    kind, id = message[0], message[1]
    if kind == To.DISPATCH:
        predicted = message[4]
        return Dispatch(id, message[2], message[3], None if predicted is None else Prediction(*predicted))
    if kind == To.HOLD:
        return Hold(id, 0.0)
    if kind == To.SHED:
        return Shed(id, message[2], message[3], message[4])
    return Abort(id, message[2], message[3])


def of_usage(usage: Usage | None) -> Sequence[Any] | None:
    return None if usage is None else (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def usage(values: Sequence[Any] | None) -> Usage | None:
    return None if values is None else Usage(*values)


# -- records -------------------------------------------------------------------------------------------------------


def of_record(record: RequestRecord, whole: bool) -> list[Any]:
    """`whole`: also what the core would know of a request that came by it."""
    attempts = [(a.replica_id, a.t_dispatch, a.t_first, a.outcome, a.detail) for a in record.attempts]
    sample = None if record.sample is None else record.sample.decode("latin-1")
    said = [_seen(record), attempts, sample]
    if whole:
        said.append((*_shared(record), record.choice_reason))
    return said


def record(values: Sequence[Any], known: Request | None, last: Dispatch | None) -> RequestRecord:
    """`known` and `last`: the request as the core has it and its last dispatch; None for one that never came by."""
    seen, attempts, sample = values[:3]
    fields = dict(zip(_SEEN, seen, strict=True))
    made = RequestRecord(fields["request_id"], 0.0)
    for name in ("prompt", "completion", "cached"):
        fields[name] = Tokens(fields[name]["count"], TokenSource(fields[name]["source"]))
    fields["objectives"] = Objectives(**fields["objectives"])
    fields["outcome"] = None if fields["outcome"] is None else Outcome(fields["outcome"])
    fields["partition"] = None if fields["partition"] is None else Partition(fields["partition"])
    if fields["unmatched"] is not None:
        fields["unmatched"] = Unmatched(**fields["unmatched"])
    for name, value in fields.items():
        setattr(made, name, value)
    made.attempts = [
        Attempt(replica, at, first, None if outcome is None else Outcome(outcome), detail)
        for replica, at, first, outcome, detail in attempts
    ]
    if sample is not None:
        made.sample = sample.encode("latin-1")
    for name, value in zip(_OF_REQUEST, values[3] if known is None else _shared(known), strict=known is not None):
        setattr(made, name, tuple(value) if name == "chain" else value)
    if known is None:
        made.choice_reason = values[3][-1]
    if last is not None:
        made.choice_reason, made.prediction = last.reason, last.prediction
        made.alternatives = last.alternatives
    return made
