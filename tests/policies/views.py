"""Small builders of what a policy sees, shared by the policies' tests."""

from __future__ import annotations

from typing import Any

from policies.model import (
    Choice,
    Completed,
    Dispatched,
    FirstToken,
    FleetView,
    Outcome,
    ReplicaView,
    Request,
    Scraped,
    Usage,
)
from policies.policy import RoutingPolicy


def replica(name: str, **fields: Any) -> ReplicaView:
    """A replica's view; `scraped` may be given as keywords of Scraped."""
    scraped = fields.pop("scraped", None)
    if isinstance(scraped, dict):
        fields["scraped"] = Scraped(name, **scraped)
    return ReplicaView(name, **fields)


def fleet(**replicas: Any) -> FleetView:
    """fleet(a=3, b=dict(in_flight=1)): a number is the requests in flight."""
    return FleetView(
        [replica(n, **({"in_flight": spec} if isinstance(spec, int) else spec)) for n, spec in replicas.items()]
    )


def ask(**fields: Any) -> Request:
    return Request(**{"id": "r", "prompt_tokens": 1000, "prompt_bytes": 4000, **fields})


def text(value: str, **fields: Any) -> Request:
    return ask(text=lambda: value, **fields)


def chosen(policy: RoutingPolicy, request: Request, view: FleetView, now: float = 0.0) -> str | None:
    return policy.choose(request, view, now).replica_id


def dispatch(policy: RoutingPolicy, request: Request, view: FleetView, now: float = 0.0) -> Choice:
    """Choose and tell the policy that it happened, as the core does."""
    choice = policy.choose(request, view, now)
    assert choice.replica_id is not None
    policy.observe(Dispatched(request, choice.replica_id), now)
    return choice


def sent(policy: RoutingPolicy, request: Request, replica_id: str, now: float = 0.0) -> None:
    policy.observe(Dispatched(request, replica_id), now)


def answered(policy: RoutingPolicy, replica_id: str, ttft_s: float, now: float) -> None:
    policy.observe(FirstToken(ask(), replica_id, ttft_s, ttft_s), now)


def finished(policy: RoutingPolicy, request: Request, replica_id: str, now: float, tokens: int = 10) -> None:
    policy.observe(Completed(request, replica_id, Outcome.SUCCESS, Usage(1000, tokens, 0), 1.0), now)
