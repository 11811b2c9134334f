"""What the core is asked: one API call, as the shell or the simulator tells it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

_NOWHERE: Mapping[str, int] = {}


@dataclass(slots=True)
class Shadowed:
    """What a policy that does not act would have done with one request; differences are its minus the taken one's."""

    policy: str
    replica_id: str
    agrees: bool
    uncached_tokens: int
    ttft_s: float  # predicted


@dataclass(slots=True, init=False)
class Request:
    """One API call as the core sees it. The deadlines are absolute times; `None` where there is no objective."""

    id: str
    model: str
    adapter: str | None
    tenant: str | None
    session: str | None
    service_class: str
    arm: str | None
    received_at: float
    ttft_deadline: float | None
    tpot_s: float | None
    itl_s: float | None
    deadline: float | None
    prompt_bytes: int
    prompt_tokens: int  # estimate
    chain: tuple[int, ...]  # 64-bit chained hashes, one per 256-byte chunk
    text: Callable[[], str] | None  # lazy; only some baselines read it
    expected_tokens: int  # expected output
    max_tokens: int | None
    streams: bool
    generates: bool
    shared_depth: Mapping[str, int]  # replica -> chunks other gateways saw there
    tenant_weight: float  # share against other tenants of the same class
    pinned: str | None  # the one replica that may take it: state of an earlier answer lives there
    group: int | None  # of replicas that may take it, while an experiment divides the fleet
    shadows: tuple[Shadowed, ...]

    def __init__(
        self,
        id: str,
        model: str = "",
        adapter: str | None = None,
        tenant: str | None = None,
        session: str | None = None,
        service_class: str = "standard",
        arm: str | None = None,
        received_at: float = 0.0,
        ttft_deadline: float | None = None,
        tpot_s: float | None = None,
        itl_s: float | None = None,
        deadline: float | None = None,
        prompt_bytes: int = 0,
        prompt_tokens: int = 0,
        chain: tuple[int, ...] = (),
        text: Callable[[], str] | None = None,
        expected_tokens: int = 0,
        max_tokens: int | None = None,
        streams: bool = True,
        generates: bool = True,
        shared_depth: Mapping[str, int] = _NOWHERE,
        tenant_weight: float = 1.0,
        pinned: str | None = None,
        group: int | None = None,
        shadows: tuple[Shadowed, ...] = (),
    ) -> None:
        self.id = id
        self.model = model
        self.adapter = adapter
        self.tenant = tenant
        self.session = session
        self.service_class = service_class
        self.arm = arm
        self.received_at = received_at
        self.ttft_deadline = ttft_deadline
        self.tpot_s = tpot_s
        self.itl_s = itl_s
        self.deadline = deadline
        self.prompt_bytes = prompt_bytes
        self.prompt_tokens = prompt_tokens
        self.chain = chain
        self.text = text
        self.expected_tokens = expected_tokens
        self.max_tokens = max_tokens
        self.streams = streams
        self.generates = generates
        self.shared_depth = shared_depth
        self.tenant_weight = tenant_weight
        self.pinned = pinned
        self.group = group
        self.shadows = shadows
