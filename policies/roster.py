"""What fleet events change: who is there, who is out, what a scrape or another gateway said of a replica.

Membership reaches the fleet, the prefix index with its ring, and whoever waits for a replica that is gone. A lost or
restarted replica has lost its cache and all that ran there; the shell reports each attempt as failed afterwards, and
until then it stays in flight here. Trade-off: a removed replica comes back as a new one, with nothing learnt.
"""

from __future__ import annotations

from policies.binding import LateBinding
from policies.dispatching import Dispatcher
from policies.fleet_state import Replica
from policies.model import (
    Added,
    Draining,
    Ejected,
    FleetEvent,
    PeerLoad,
    Pulse,
    Removed,
    Restarted,
    Returned,
    Scraped,
)


class Roster:
    """Applies events; decides nothing."""

    def __init__(self, dispatcher: Dispatcher, binding: LateBinding) -> None:
        self.fleet, self.affinity = dispatcher.fleet, dispatcher.affinity
        self.dispatcher = dispatcher
        self.binding = binding

    def apply(self, event: FleetEvent, now: float) -> bool:
        """False for an event about a replica that is not (or no longer) there; Added adds it."""
        replica = self.fleet.replicas.get(event.replica_id)
        match event:
            case Added():
                replica = self._added(event, replica, now)
            case _ if replica is None:
                return False
            case Removed():
                self._lost(replica, now)
                self.binding.forget_preferences(replica)
                self.affinity.remove(replica.id)
                self.fleet.remove(replica.id)
            case Draining():
                replica.draining = event.draining
            case Ejected():
                replica.ejected, replica.statistical = True, event.statistical
            case Returned():
                replica.ejected = replica.statistical = False
                replica.closed_until = now
            case Restarted():
                self._lost(replica, now)
            case Scraped():
                self._scraped(replica, event, now)
            case PeerLoad():
                self._heard(replica, event, now)
        if not isinstance(event, Scraped | PeerLoad):
            self.fleet.refresh()
            if replica.down or replica.ejected:
                self.binding.forget_preferences(replica)
        return True

    def _added(self, event: Added, known: Replica | None, now: float) -> Replica:
        if known is not None:  # new models or weight; what runs there stays
            known.described(event)
            return known
        slot = self.affinity.add(event.replica_id, event.weight, event.kv_capacity_tokens)
        return self.fleet.add(event, slot, now)

    def _lost(self, replica: Replica, now: float) -> None:
        """All that ran on it is gone; the shell will report each attempt as failed."""
        replica.ledger.restart()
        replica.changed(now)
        replica.fill.clear()
        replica.kv.restarted()
        self.affinity.restarted(replica.id)

    def _scraped(self, replica: Replica, event: Scraped, now: float) -> None:
        was_down = replica.down
        replica.scraped = replica.view.scraped = event
        replica.residence.scraped(event)
        replica.kv.scraped(event, 0.5 * replica.ledger.answer_tokens, self.dispatcher.settings)
        replica.changed(now)
        if replica.kv.capacity is not None:
            self.affinity.capacity(replica.id, replica.kv.capacity)
        if replica.heard_of(now) is not None:
            self.affinity.stays(replica.id, replica.keeps_s, now)
        if event.adapters_running or event.adapters_waiting or event.max_adapters is not None:
            loaded = frozenset(event.adapters_running) | frozenset(event.adapters_waiting)
            replica.view.adapters = loaded
            replica.view.adapter_room = event.max_adapters is None or len(loaded) < event.max_adapters
        if replica.down != was_down:
            self.fleet.refresh()

    def _heard(self, replica: Replica, event: PeerLoad, now: float) -> None:
        replica.heard(event, now)
        if not replica.pulsed.live and event.live:  # nobody else pulses here
            replica.pace.pulse(replica.everyones(Pulse(), now), replica.decode, self.dispatcher.settings, now)
