"""One open request as the core follows it: held here, or dispatched to a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from policies.ledger import Charge
from policies.model import Request, ServiceClass

if TYPE_CHECKING:
    from policies.fleet_state import Replica
    from policies.queue import Flow


NEVER: Final = float("inf")


class Tracked:
    """Dispatched when `replica` is set, held when `flow` is set; never both."""

    __slots__ = (
        "attempts", "charge", "due", "flow", "last_context", "latest_start", "looked_at", "newcomer", "not_before",
        "parked_s", "predicted_ttft_s", "preferred", "replica", "request", "seq", "service_class", "service_s",
        "started", "taken_back", "tried",
    )  # fmt: skip

    def __init__(self, request: Request, service_class: ServiceClass) -> None:
        self.request = request
        self.service_class = service_class
        # dispatched
        self.replica: Replica | None = None
        self.charge: Charge | None = None
        self.predicted_ttft_s = 0.0
        self.service_s = 0.0  # predicted prefill seconds of this request alone
        self.started = False  # its first token was seen
        self.attempts = 0
        self.tried: tuple[str, ...] = ()
        # held
        self.flow: Flow | None = None
        self.due = 0.0  # what the queue is ordered by
        self.seq = 0
        self.latest_start = NEVER
        self.preferred: Replica | None = None  # where it would go now; its work is parked there
        self.looked_at = -NEVER
        self.parked_s = 0.0
        self.taken_back = 0  # times it was taken back from a replica before it answered
        self.not_before = -NEVER  # then: it is not sent again before this
        self.newcomer = False  # first turn of a conversation the working set has not let in
        self.last_context = 0.0  # tokens its conversation held when this turn began

    def forget_try(self, replica_id: str) -> None:
        """It may go there again."""
        self.tried = tuple([name for name in self.tried if name != replica_id])

    @property
    def held(self) -> bool:
        return self.flow is not None
