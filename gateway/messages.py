"""What hands and the core say to each other, and how requests, decisions and records look on the way.

Only what decides travels: hashes of the prompt, sizes, class, tenant, deadlines; and the body of the few prompts that
the core wants to look into (`prefixes.py`). Times are monotonic seconds, which all processes of one host share. Of a
finished request the core knows the request and its last decision already, so only what the hand saw comes back. The
arrays are positional and flat, each field written out on both sides: that is what makes them cheap, and both sides are
of one release, since a supervisor never mixes two.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

from gateway.record import Attempt, RequestRecord, Tokens, TokenSource, Unmatched
from policies.model import Abort, Decision, Dispatch, Hold, Outcome, Prediction, Request, Shed, Usage
from policies.objectives import Objectives, Partition

Message = list[Any]


class To(IntEnum):
    """First element of a message. Where every request tells one, both ends use the plain numbers below."""

    # a hand tells the core
    HELLO = 0  # slot, pid, configuration number, its document, view of the fleet, what the core before had learnt
    SUBMIT = 1  # id, title, request
    FIRST = 2  # id
    FAILED = 3  # id, outcome
    COMPLETE = 4  # id, outcome, usage, replica, what the hand saw or None
    PULSE = 5  # replica, events, and a Pulse
    SIGN = 6  # replica, sign
    RECORD = 7  # what the hand saw, and the request that the core never had
    ASK = 8  # number, scope, body: a request for the control plane
    STATE = 9  # a mapping, once a second
    MADE = 10  # response id, replica (both ways)
    ADOPT = 11  # id, title, request, replica, dispatched at, started
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
    PRESSED = 34  # whether requests are held


# of the enumeration, as the compiler knows them
SUBMIT: Final = 1
FIRST: Final = 2
COMPLETE: Final = 4
DISPATCH: Final = 21
ABORT: Final = 24
_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}
_PARTITIONS: Final = {partition.value: partition for partition in Partition}
_SOURCES: Final = {source.value: source for source in TokenSource}


def outcome(value: str) -> Outcome:
    """Raises KeyError for what is none."""
    return _OUTCOMES[value]


def title(record: RequestRecord) -> Message:
    """What a request is called where the core writes of it."""
    return [record.request_id, record.received_unix, record.endpoint, record.kind]


def _called(title: Message, received_at: float) -> RequestRecord:
    id, received_unix, endpoint, kind = title
    made = RequestRecord(id, received_at)
    made.received_unix, made.endpoint, made.kind = received_unix, endpoint, kind
    return made


def of_request(r: Request) -> Message:
    """Everything but its id and its text, which stays where the body is."""
    return [
        r.model, r.adapter, r.tenant, r.session, r.service_class, r.arm, r.received_at, r.ttft_deadline, r.tpot_s,
        r.itl_s, r.deadline, r.prompt_bytes, r.prompt_tokens, r.chain, r.expected_tokens, r.max_tokens, r.streams,
        r.generates, r.shared_depth, r.tenant_weight, r.pinned,
    ]  # fmt: skip


def request(id: str, values: Message) -> Request:
    (
        model, adapter, tenant, session, service_class, arm, received_at, ttft_deadline, tpot_s,
        itl_s, deadline, prompt_bytes, prompt_tokens, chain, expected_tokens, max_tokens, streams,
        generates, shared_depth, tenant_weight, pinned,
    ) = values  # fmt: skip
    return Request(
        id, model, adapter, tenant, session, service_class, arm, received_at, ttft_deadline, tpot_s,
        itl_s, deadline, prompt_bytes, prompt_tokens, tuple(chain), None, expected_tokens, max_tokens, streams,
        generates, shared_depth, tenant_weight, pinned,
    )  # fmt: skip


def titled(values: Message, request: Request) -> RequestRecord:
    """The beginnings of a record: what the core knows of a request that a hand has."""
    made = _called(values, request.received_at)
    made.model, made.adapter, made.arm = request.model, request.adapter, request.arm
    made.tenant, made.session = request.tenant, request.session
    made.service_class, made.streams = request.service_class, request.streams
    made.prompt_bytes, made.chain = request.prompt_bytes, request.chain
    made.prompt = Tokens(request.prompt_tokens)
    return made


# -- decisions -----------------------------------------------------------------------------------------------------


def of_decision(id: str, decision: Decision) -> Message:
    if isinstance(decision, Dispatch):
        said = decision.prediction
        if said is None:
            return [DISPATCH, id, decision.replica_id, decision.reason, None]
        predicted = [said.ttft_s, said.tpot_s, said.uncached_tokens, said.cached_tokens, said.scraped_age_s]
        return [DISPATCH, id, decision.replica_id, decision.reason, predicted]
    if isinstance(decision, Hold):
        return [To.HOLD, id]
    if isinstance(decision, Shed):
        return [To.SHED, id, decision.reason, decision.retry_after_s, decision.predicted_ttft_s, decision.said]
    return [To.ABORT, id, decision.reason, decision.requeue]


def decision(message: Message) -> Decision:
    kind: int = message[0]
    id: str = message[1]
    if kind == DISPATCH:
        _, _, replica_id, reason, predicted = message
        return Dispatch(id, replica_id, reason, None if predicted is None else Prediction(*predicted))
    if kind == To.HOLD:
        return Hold(id, 0.0)
    if kind == To.SHED:
        return Shed(id, message[2], message[3], message[4], message[5])
    return Abort(id, message[2], message[3])


def of_usage(usage: Usage | None) -> Message | None:
    return None if usage is None else [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]


def usage(values: Message | None) -> Usage | None:
    if values is None:
        return None
    prompt_tokens, completion_tokens, cached_tokens = values
    return Usage(prompt_tokens, completion_tokens, cached_tokens)


# -- records -------------------------------------------------------------------------------------------------------


def of_record(r: RequestRecord, whole: bool) -> Message:
    """`whole`: also what the core would know of a request that came by it."""
    attempts = [[a.replica_id, a.t_dispatch, a.t_first, a.outcome, a.detail] for a in r.attempts]
    bounds, prompt, completion, cached = r.objectives, r.prompt, r.completion, r.cached
    return [
        prompt.count, prompt.source, completion.count, completion.source, cached.count, cached.source,
        bounds.ttft_s, bounds.tpot_s, bounds.itl_s, bounds.e2e_s, r.client_retry, r.committed_at, r.first_content_at,
        r.last_content_at, r.longest_gap_s, r.content_events, r.ended_at, r.status, r.outcome, r.partition, r.reason,
        r.unmatched, attempts, None if r.sample is None else r.sample.decode("latin-1"),
        (title(r), _own(r)) if whole else None,
    ]  # fmt: skip


def _own(r: RequestRecord) -> Message:
    return [
        r.received_at, r.model, r.adapter, r.tenant, r.session, r.service_class, r.arm, r.streams, r.prompt_bytes,
        r.chain, r.choice_reason,
    ]  # fmt: skip


def known_record(values: Message, made: RequestRecord, last: Dispatch | None) -> RequestRecord:
    """Puts what a hand saw into `made`, which says what the core knows of it; `last`: its last dispatch."""
    (
        prompt, prompt_source, completion, completion_source, cached, cached_source,
        ttft_s, tpot_s, itl_s, e2e_s, made.client_retry, made.committed_at, made.first_content_at,
        made.last_content_at, made.longest_gap_s, made.content_events, made.ended_at, made.status, outcome, partition,
        made.reason, unmatched, attempts, sample, _,
    ) = values  # fmt: skip
    made.prompt = Tokens(prompt, _SOURCES[prompt_source])
    made.completion = Tokens(completion, _SOURCES[completion_source])
    made.cached = Tokens(cached, _SOURCES[cached_source])
    made.objectives = Objectives(ttft_s, tpot_s, itl_s, e2e_s)
    made.outcome = None if outcome is None else _OUTCOMES[outcome]
    made.partition = None if partition is None else _PARTITIONS[partition]
    if unmatched is not None:
        made.unmatched = Unmatched(**unmatched)
    for replica_id, at, first, ended, detail in attempts:
        made.attempts.append(Attempt(replica_id, at, first, None if ended is None else _OUTCOMES[ended], detail))
    if sample is not None:
        made.sample = sample.encode("latin-1")
    if last is not None:
        made.choice_reason, made.prediction = last.reason, last.prediction
        made.alternatives = last.alternatives
    return made


def unknown_record(values: Message) -> RequestRecord:
    """Of a request that the core never had: `of_record` told it whole."""
    called, own = values[-1]
    made = _called(called, own[0])
    (
        _, made.model, made.adapter, made.tenant, made.session, made.service_class, made.arm, made.streams,
        made.prompt_bytes, chain, made.choice_reason,
    ) = own  # fmt: skip
    made.chain = tuple(chain)
    return known_record(values, made, None)
