"""From received bytes to a request of the core: model, class, objectives, prompt identity, and how it is placed.

Generation and pooling are placed by the core; cheap and stateful calls go straight to a replica, since they cost no
engine time and must never be held. A model nobody ever served is 404, one that is known but down is 503; no model is
the fleet's first one. Prompt tokens are estimated from canonical bytes and what usage taught about bytes per token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING

from gateway import headers as header_rules
from gateway import openai, pinning, timeline
from gateway.client import Scope
from gateway.endpoints import Endpoint, Kind, response_id
from gateway.errors import Api, Code, GatewayError
from gateway.record import RequestRecord
from gateway.tenants import Lease, Tenant
from gateway.upstream import Pool
from policies import canonical, prefix
from policies.classes import stamp
from policies.model import Dispatch, Outcome, Request, ServiceClass, Shed, Usage

if TYPE_CHECKING:
    from gateway.course import Course
    from gateway.proxy import Proxy
    from gateway.relay import Relay

_numbers = count(1)


class Admission:
    """A request that was let in, and the way it is placed. `candidates`: replicas for direct placement."""

    __slots__ = ("_told_first", "call", "candidates", "endpoint", "lease", "proxy", "request", "service_class")

    def __init__(
        self,
        proxy: Proxy,
        endpoint: Endpoint,
        call: openai.Call,
        request: Request,
        service_class: ServiceClass,
        lease: Lease | None = None,
        candidates: list[str] | None = None,
    ) -> None:
        self.proxy = proxy
        self.endpoint = endpoint
        self.call = call
        self.request = request
        self.service_class = service_class
        self.lease = lease
        self.candidates = candidates
        self._told_first = False

    def start(self, exchange: Course) -> None:
        self.proxy.budget.request()
        if self.candidates is None:
            self.proxy.scheduler.submit(self.request, exchange)
        else:
            self.proxy.scheduler.tick()
            exchange.on_decision(self._next())

    def failed(self, exchange: Course, outcome: Outcome) -> None:
        """Another replica, please; the answer comes as a decision."""
        self._told_first = False
        if self.candidates is None:
            self.proxy.scheduler.failed(self.request.id, outcome)
        else:
            exchange.on_decision(self._next())

    def first_token(self, replica_id: str) -> None:
        if self.candidates is None and not self._told_first:
            self._told_first = True
            self.proxy.scheduler.first_token(self.request.id, replica_id)

    def committed(self, replica_id: str) -> None:
        """No other attempt follows: the core may not take it back any more, and nobody needs its prompt."""
        self.first_token(replica_id)
        self.call.body, self.call.parts, self.call.document = b"", [], None
        self.request.text = None

    def _next(self) -> Dispatch | Shed:
        assert self.candidates is not None
        if not self.candidates:
            return Shed(self.request.id, "no_replica", 1.0)
        return Dispatch(self.request.id, self.candidates.pop(0), "direct")

    def message(self, pool: Pool, exchange: Course) -> list[bytes | memoryview]:
        """The forwarded request in parts: head, then the body as received (and the usage splice)."""
        template, rules = exchange.head, self.proxy.rules
        parts = self.call.parts
        known = None if template is None else template.forwarded(pool, rules)
        if known is None:
            known = self._lines(pool, exchange)
            if template is not None:
                template.remember(pool, rules, *known)
        before, between = known
        if parts or exchange.scope["method"] in ("POST", "PUT", "PATCH"):
            between += b"content-length: %d\r\n" % self.call.length
        head = b"%b%b\r\n%b\r\n" % (before, exchange.request_id, between)
        if len(parts) == 1 and len(parts[0]) < 16384:
            return [head + parts[0]]
        return [head, *parts]

    def _lines(self, pool: Pool, exchange: Course) -> tuple[bytes, bytes]:
        """The head as it is forwarded: what stands before the request id, and behind it without length and end."""
        scope, proxy = exchange.scope, self.proxy
        query: bytes = scope["query_string"]
        client = scope.get("client")
        lines = header_rules.upstream(
            scope["headers"],
            peer=client[0] if client else "",
            scheme=scope.get("scheme", "http"),
            trusted=proxy.trusted,
            authorization=pool.authorization,
            drop_authorization=proxy.tenants.configured,
        )
        target = pool.prefix + scope["raw_path"] + (b"?" + query if query else b"")
        first = b"%b %b HTTP/1.1\r\nhost: %b\r\nx-request-id: " % (scope["method"].encode(), target, pool.authority)
        return first, b"".join(lines)

    def close(self, record: RequestRecord, usage: Usage | None, relay: Relay | None) -> None:
        """The end of the request: core, meters, tenant, and what the record still lacks."""
        proxy, request = self.proxy, self.request
        meter = proxy.scheduler.meters.get(record.replica_id or "")
        estimate = request.prompt_tokens
        timeline.tokens(record, usage, meter.tokens_per_event if meter is not None else 1.0, estimate)
        known = None if usage is None else usage.prompt_tokens
        record.objectives = timeline.objectives(request, self.service_class, self.call.tighter.ttft_s, known)
        if request.shadows:
            record.shadows = request.shadows
        if self.candidates is None:
            outcome = record.outcome or Outcome.ERROR
            proxy.scheduler.complete(request.id, outcome, usage, record.replica_id)
        if record.outcome is Outcome.SUCCESS and usage is not None:
            if meter is not None and relay is not None:
                meter.ended(relay.content_events, usage.completion_tokens)
            if known:
                proxy.bytes_per_token.observe(request.model, request.prompt_bytes, known)
        if self.lease is not None:
            self.lease.settle(record.charged_tokens, time.monotonic())


def admit(
    proxy: Proxy,
    endpoint: Endpoint,
    scope: Scope,
    headers: Mapping[bytes, bytes],
    tenant: Tenant | None,
    body: bytes,
    record: RequestRecord,
) -> Admission:
    """Raises GatewayError for whatever may not or cannot be served."""
    rules = proxy.rules
    call = openai.parse(endpoint, headers, body, ask_usage=rules.asks_usage)
    if endpoint.kind is Kind.STATEFUL:
        holders = [pinning.holder(proxy, response_id(scope["path"]))]
        request = Request(id=_id(), model="", received_at=record.received_at, generates=False, streams=False)
        record.kind, record.streams, record.service_class = endpoint.kind, False, rules.default_class
        return Admission(proxy, endpoint, call, request, proxy.service_class(rules.default_class), None, holders)
    name = call.model or proxy.default_model()
    target = proxy.fleet.resolve(name) if name else None
    if target is None and (name or not proxy.fleet.replicas):
        if proxy.fleet.complete:
            raise GatewayError(
                Code.UNKNOWN_MODEL,
                f"the model {name[:200]!r} does not exist here; GET /v1/models lists those that do",
                param="model",
            )
        raise GatewayError(Code.NO_REPLICA, "no replica has told its models yet", 1.0)
    model, adapter = (target.model, target.adapter) if target is not None else ("", None)
    asked = headers.get(b"x-service-class")
    class_name = proxy.tenants.service_class(tenant, None if asked is None else asked.decode("latin-1"), name)
    service_class = proxy.service_class(class_name)
    if proxy.door.shedding and service_class.sheddable:
        raise proxy.door.late()
    # who looks at no prompt is not shown one: bytes of the body do for an estimate
    reads = proxy.scheduler.reads_prefix or rules.journals
    parts = call.canonical(endpoint, model, adapter) if reads else []
    prompt_bytes = len(body) if canonical.cut(parts) else sum([len(part) for part in parts], 0) or len(body)
    generates = endpoint.kind is Kind.GENERATE
    earlier = call.previous_response if endpoint.api is Api.RESPONSES else None
    request = Request(
        id=_id(),
        model=model,
        adapter=adapter,
        tenant=None if tenant is None else tenant.name,
        session=call.session,
        received_at=record.received_at,
        prompt_bytes=prompt_bytes,
        prompt_tokens=max(1, round(proxy.bytes_per_token.tokens(model, prompt_bytes))),
        chain=prefix.chain(parts) if reads else (),
        max_tokens=None if call.max_tokens is None else call.max_tokens * call.answers,
        streams=call.streams,
        generates=generates,
        tenant_weight=1.0 if tenant is None else tenant.weight,
        pinned=pinning.holder(proxy, earlier, name) if earlier else None,
    )
    request.text = lambda: b"".join(parts).decode("utf-8", "replace")
    tighter = call.tighter
    stamp(request, service_class, ttft_s=tighter.ttft_s, tpot_s=tighter.tpot_s, e2e_s=tighter.deadline_s)
    if proxy.experiment is not None:
        record.assignment = proxy.experiment.assign(request, record.received_unix)
    _note(record, endpoint, request, rules.policy)
    retried = headers.get(b"x-stainless-retry-count")  # what official clients call their own retries
    if retried is not None and retried.isdigit() and len(retried) < 4:
        record.client_retry = int(retried)
    if rules.samples:
        record.sample = body
    if proxy.prefixes is not None and request.chain:
        proxy.prefixes.admitted(endpoint.api, call, parts, request, record)
    candidates = proxy.available(name) if endpoint.kind is Kind.CHEAP else None
    if candidates is not None:
        random.shuffle(candidates)
    lease = None
    if tenant is not None and (candidates is not None or not proxy.scheduler.charges):
        lease = proxy.tenants.admit(tenant, request.prompt_tokens + (call.max_tokens or 0), record.received_at)
    return Admission(proxy, endpoint, call, request, service_class, lease, candidates)


def _note(record: RequestRecord, endpoint: Endpoint, request: Request, policy: str) -> None:
    record.kind, record.model, record.adapter = endpoint.kind, request.model, request.adapter
    record.tenant, record.session, record.policy = request.tenant, request.session, policy
    record.service_class, record.streams = request.service_class, request.streams
    record.prompt_bytes, record.chain, record.arm = request.prompt_bytes, request.chain, request.arm


def _id() -> str:
    """Unique among open requests whatever clients send as theirs."""
    return f"r{next(_numbers)}"
