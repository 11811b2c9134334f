"""The scheduler of a gateway that shares: before the core decides, what Redis knows about the request is added to it.

Asked for in one round trip: which replicas other gateways sent its prefix to (`shared_depth`), and whether its tenant
has quota left over all gateways. Without an answer in time the request goes on with what is known here: an empty
`shared_depth` and this gateway's own bucket. The local bucket is charged in any case, so that it is right when needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.errors import GatewayError
from gateway.placement import Owner
from gateway.scheduler import Scheduler
from gateway.shared import quotas
from gateway.shared.lookups import Ask, Lookups
from gateway.shared.prefix_index import PrefixIndex
from gateway.shared.registers import Registers
from gateway.shared.store import Command, Store
from gateway.tenants import Lease, Tenant, Tenants
from policies.affinity import CHUNK_BYTES
from policies.core import Balancer
from policies.model import Decision, Dispatch, Outcome, Request, Shed, Usage


@dataclass(slots=True, eq=False)
class Shared:
    """What is remembered of one open request."""

    request: Request
    owner: Owner
    asked: Ask | None = None  # it waits for Redis
    lease: Lease | None = None
    taken: bool = False  # from the bucket in Redis
    written: bool = False


class SharedScheduler(Scheduler):
    """`tenants` is set by whoever makes it. Parts that talk to Redis are given by `sharing.Sharing`."""

    charges = True
    store: Store
    lookups: Lookups
    index: PrefixIndex
    registers: Registers

    def __init__(self, balancer: Balancer, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(balancer, clock)
        self.tenants: Callable[[], Tenants | None] = lambda: None
        self.sent_long: Callable[[], None] = lambda: None
        self.due: list[Command] = []  # to be told to Redis with the next exchange
        self._shared: dict[str, Shared] = {}

    def submit(self, request: Request, owner: Owner) -> None:
        entry = self._shared[request.id] = Shared(request, owner)
        tenant = self._tenant(request)
        if tenant is not None and self._crowded(tenant):
            self._refuse(entry, tenant.full())
            return
        keys = self.index.keys(request.chain) if request.chain and self.reads_prefix else []
        command = None
        if tenant is not None and quotas.limited(tenant):
            command = quotas.take(self.store, tenant, _estimate(request))
        if not self.lookups.usable or (not keys and command is None):
            self._place(entry, tenant, None)
            return
        self.tick()
        entry.asked = self.lookups.ask(keys, command, lambda values, wait: self._answered(entry, values, wait))

    def first_token(self, request_id: str, replica_id: str) -> None:
        self._prefilled(request_id, replica_id)
        super().first_token(request_id, replica_id)

    def complete(self, request_id: str, outcome: Outcome, usage: Usage | None, replica_id: str | None) -> None:
        if outcome is Outcome.SUCCESS and replica_id is not None:
            self._prefilled(request_id, replica_id)
            self._ended(request_id, replica_id, usage)
        entry = self._shared.pop(request_id, None)
        if entry is not None:
            if entry.asked is not None:
                entry.asked.done = None  # its client left while Redis was asked
            self._settle(entry, _used(outcome, usage, replica_id))
        super().complete(request_id, outcome, usage, replica_id)

    def _apply(self, decisions: list[Decision]) -> None:
        super()._apply(decisions)
        if any(isinstance(d, Dispatch) and self.balancer.long(d) for d in decisions):
            self.sent_long()

    # -- inside --------------------------------------------------------------------------------------------------

    def _tenant(self, request: Request) -> Tenant | None:
        tenants = self.tenants()
        return None if tenants is None or request.tenant is None else tenants.by_name.get(request.tenant)

    def _crowded(self, tenant: Tenant) -> bool:
        """Over its concurrency, with what the other gateways said they have open."""
        elsewhere = self.registers.tenants_open.get(tenant.name, 0)
        return tenant.concurrency is not None and tenant.open + elsewhere >= tenant.concurrency

    def _answered(self, entry: Shared, values: list[bytes | None] | None, quota: Any) -> None:
        entry.asked = None
        if values:
            entry.request.shared_depth = self.index.found(values, len(entry.request.chain))
        self._place(entry, self._tenant(entry.request), quota)

    def _place(self, entry: Shared, tenant: Tenant | None, quota: bytes | None) -> None:
        """`quota`: what the shared bucket says; None: nothing, so our own decides."""
        if tenant is not None:
            tokens, now = _estimate(entry.request), self.clock()
            if quota is None:
                try:
                    entry.lease = self._own(tenant, tokens, now)
                except GatewayError as refusal:
                    self._refuse(entry, refusal)
                    return
            elif (over := quotas.refused(tenant, quota)) is not None:
                self._refuse(entry, over)
                return
            else:
                entry.taken = True
                tenant.requests.take(1, now)
                tenant.tokens.take(tokens, now)
                entry.lease = tenant.resume(tokens)
        super().submit(entry.request, entry.owner)

    def _own(self, tenant: Tenant, tokens: int, now: float) -> Lease | None:
        tenants = self.tenants()
        return None if tenants is None else tenants.admit(tenant, tokens, now)

    def _refuse(self, entry: Shared, error: GatewayError) -> None:
        self._shared.pop(entry.request.id, None)
        entry.owner.on_decision(Shed(entry.request.id, error.code, error.retry_after_s, said=error.message))

    def _settle(self, entry: Shared, used_tokens: int | None) -> None:
        if entry.lease is None:
            return
        entry.lease.settle(used_tokens, self.clock())
        if entry.taken and used_tokens is not None and len(self.due) < 10_000:
            back = _estimate(entry.request) - used_tokens
            if back:
                self.due.append(quotas.give_back(self.store, entry.lease.tenant, back))

    def _prefilled(self, request_id: str, replica_id: str) -> None:
        entry = self._shared.get(request_id)
        if entry is not None and not entry.written and entry.request.chain:
            entry.written, request = True, entry.request
            self.index.answered(request.chain, replica_id, _beyond(request, request.prompt_bytes))

    def _ended(self, request_id: str, replica_id: str, usage: Usage | None) -> None:
        """Its answer is cached behind its prompt, for the next turn to find wherever that is placed."""
        entry = self._shared.get(request_id)
        if entry is None or not entry.request.chain or usage is None or not usage.completion_tokens:
            return
        request, ratio = entry.request, self.balancer.dispatcher.affinity.bytes_per_token
        size = request.prompt_bytes + int(usage.completion_tokens * ratio.ratio(request.model))
        self.index.answered(request.chain, replica_id, _beyond(request, size))


def _beyond(request: Request, size: int) -> int:
    """Chunks of so many bytes that follow the request's chain, which a long prompt is longer than."""
    return max(0, size // CHUNK_BYTES - len(request.chain))


def _estimate(request: Request) -> int:
    return request.prompt_tokens + (request.max_tokens or 0)


def _used(outcome: Outcome, usage: Usage | None, replica_id: str | None) -> int | None:
    """Tokens to charge: none for what ran nowhere, None where nobody counted."""
    if outcome is Outcome.SHED or replica_id is None:
        return 0
    if usage is None or usage.prompt_tokens is None:
        return None
    return usage.prompt_tokens + (usage.completion_tokens or 0)
