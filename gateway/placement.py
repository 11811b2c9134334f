"""Where requests are placed, as the proxy sees it: the scheduler in this process, or the core in another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.pulses import Meter
from gateway.record import RequestRecord
from policies.model import Decision, Outcome, Request, Usage


class Owner(Protocol):
    """Who waits for the decisions about one request. Its record says what the client calls it."""

    @property
    def record(self) -> RequestRecord: ...

    def on_decision(self, decision: Decision) -> None: ...


class Placement(Protocol):
    """`Scheduler` and `RemoteScheduler`. Decisions reach the owner, at once or later."""

    meters: dict[str, Meter]
    on_tick: Callable[[float], bool] | None

    @property
    def reads_prefix(self) -> bool:
        """Whether a request's chain changes any decision."""

    @property
    def charges(self) -> bool:
        """Whether tenants are charged with the decision instead of before it."""

    def tick(self) -> None: ...

    def submit(self, request: Request, owner: Owner) -> None: ...

    def first_token(self, request_id: str, replica_id: str) -> None: ...

    def failed(self, request_id: str, outcome: Outcome) -> None: ...

    def complete(self, request_id: str, outcome: Outcome, usage: Usage | None, replica_id: str | None) -> None: ...

    def dispatched(self, replica_id: str) -> Meter: ...


Sink = Callable[[RequestRecord], None]
