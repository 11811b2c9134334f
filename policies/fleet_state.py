"""What the core knows of each replica, and the one view per replica that policies get to see.

One mutable owner: the core. The `ReplicaView` objects are made once per replica and refreshed in place for
each decision, because at 64 replicas making them anew costs more than the decision itself.
"""

from __future__ import annotations

from policies.ledger import WorkLedger
from policies.model import Added, FleetView, PeerLoad, ReplicaView, Request, Scraped
from policies.predictor import DecodeFit, PrefillFit
from policies.settings import Settings


class Replica:
    """State of one replica. `available` is what the fleet events say, before panic mode."""

    __slots__ = (
        "adapters_served", "decode", "draining", "ejected", "id", "ledger", "models", "peers", "prefill", "scraped",
        "statistical", "view",
    )  # fmt: skip

    def __init__(self, event: Added, prior: PrefillFit, settings: Settings) -> None:
        self.id = event.replica_id
        self.models, self.adapters_served = event.models, event.adapters
        self.ledger = WorkLedger()
        rate = event.prefill_rate or prior.rate or settings.prior_prefill_rate
        self.prefill = PrefillFit(rate, prior.overhead_s)
        self.decode = DecodeFit()
        self.draining = self.ejected = self.statistical = False
        self.scraped: Scraped | None = None
        self.peers: PeerLoad | None = None
        capacity = event.kv_capacity_tokens
        self.view = ReplicaView(
            event.replica_id,
            weight=event.weight,
            role=event.role,
            kv_capacity_tokens=None if capacity is None else float(capacity),
            adapters=event.adapters,
        )

    def serves(self, request: Request) -> bool:
        return (
            not self.models
            or request.model in self.models
            or request.model in self.adapters_served
            or (request.adapter is not None and request.adapter in self.adapters_served)
        )

    @property
    def down(self) -> bool:
        """Out for a reason that panic mode does not override."""
        asleep = self.scraped is not None and self.scraped.awake is False
        return self.draining or asleep or (self.ejected and not self.statistical)


class Fleet:
    """All replicas in order of addition, and the views of those that serve one model or adapter."""

    def __init__(self, settings: Settings) -> None:
        self.replicas: dict[str, Replica] = {}
        self.settings = settings
        self.prior = PrefillFit(settings.prior_prefill_rate, settings.prior_overhead_s)
        self._pools: dict[tuple[str, str | None], Pool] = {}

    def add(self, event: Added) -> Replica:
        """A new replica, or news of a known one: its models, adapters, weight and role change, its work stays."""
        self._pools.clear()
        replica = self.replicas.get(event.replica_id)
        if replica is None:
            replica = self.replicas[event.replica_id] = Replica(event, self.prior, self.settings)
        else:
            replica.models, replica.adapters_served = event.models, event.adapters
            replica.view.weight, replica.view.role, replica.view.adapters = event.weight, event.role, event.adapters
        return replica

    def remove(self, replica_id: str) -> Replica | None:
        self._pools.clear()
        return self.replicas.pop(replica_id, None)

    def pool(self, request: Request) -> Pool:
        key = (request.model, request.adapter)
        found = self._pools.get(key)
        if found is None:
            if len(self._pools) > 4096:  # names come from clients: bounded
                self._pools.clear()
            found = self._pools[key] = Pool([r for r in self.replicas.values() if r.serves(request)])
            found.refresh(self.settings.panic_share)
        return found

    def refresh(self) -> None:
        """Availability changed somewhere."""
        for pool in self._pools.values():
            pool.refresh(self.settings.panic_share)


class Pool:
    """The replicas that serve one model or adapter."""

    __slots__ = ("open", "replicas", "view")

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.view = FleetView([r.view for r in replicas])
        self.open: list[bool] = []  # may be dispatched to, panic mode applied

    def refresh(self, panic_share: float) -> None:
        up = [not r.down and not r.ejected for r in self.replicas]
        if sum(up) < panic_share * len(up):  # panic: a mostly ejected fleet is a wrong verdict, not a dead fleet
            up = [not r.down for r in self.replicas]
        self.open = up
