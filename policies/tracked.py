"""One open request as the core follows it: held here, or dispatched to a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from policies.ledger import Charge
from policies.model import Request, ServiceClass

if TYPE_CHECKING:
    from policies.fleet_state import Replica
    from policies.queue import Flow


@dataclass(slots=True, eq=False)
class Tracked:
    """Dispatched when `replica` is set, held when `flow` is set; never both."""

    request: Request
    service_class: ServiceClass
    # dispatched
    replica: Replica | None = None
    charge: Charge | None = None
    predicted_ttft_s: float = 0.0
    service_s: float = 0.0  # predicted prefill seconds of this request alone
    cached_tokens: float = 0.0  # predicted
    started: bool = False  # its first token was seen
    attempts: int = 0
    tried: tuple[str, ...] = ()
    # held
    flow: Flow | None = None
    due: float = 0.0  # what the queue is ordered by
    seq: int = 0
    latest_start: float = float("inf")
    preferred: Replica | None = None  # where it would go now; its work is parked there
    looked_at: float = float("-inf")
    parked_s: float = 0.0
    taken_back: int = 0  # times it was taken back from a replica before it answered
    not_before: float = float("-inf")  # then: it is not sent again before this
    newcomer: bool = False  # first turn of a conversation the working set has not let in
    last_context: float = 0.0  # tokens its conversation held when this turn began

    def forget_try(self, replica_id: str) -> None:
        """It may go there again."""
        self.tried = tuple([name for name in self.tried if name != replica_id])

    @property
    def held(self) -> bool:
        return self.flow is not None
