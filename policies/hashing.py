"""session_hash and rendezvous: a session always goes to the same replica, whatever its load.

session_hash: uhashring ring of 160 points per replica; a dead home's sessions go to the next on the ring
(vllm-router's consistent_hash sends them all to the first healthy replica of the list). rendezvous: argmax of
hash(key:replica); more even than a ring for few keys (vllm-router PR 128), O(N) per lookup. The key is the explicit
session and nothing else: request ids change per call, API keys and addresses are shared. Without a session: random.
Trade-off: no load term, so a saturated home keeps its sessions (prime-rl issue 3255: a thrash spiral from 98 % to 5
% hits).
"""

from __future__ import annotations

from random import Random

from xxhash import xxh3_64_intdigest

from policies.model import Added, Choice, FleetView, PolicyEvent, Removed, Request
from policies.parameters import NoParameters
from policies.policy import NONE_AVAILABLE, Stateless
from policies.ring import Ring


class SessionHash:
    name = "session_hash"
    blind = True

    def __init__(self, parameters: NoParameters, rng: Random) -> None:
        self._rng = rng
        self._ring = Ring()

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        if request.session is None:
            return Choice(self._rng.choice(available).id, "random")
        up = {r.id for r in available}
        for replica in available:
            if replica.id not in self._ring:
                self._ring.add(replica.id)
        for step, replica_id in enumerate(self._ring.preference(request.session)):
            if replica_id in up:
                return Choice(replica_id, "affinity" if step == 0 else "spill")
        return NONE_AVAILABLE

    def observe(self, event: PolicyEvent, now: float) -> None:
        if isinstance(event, Added):
            self._ring.add(event.replica_id)
        elif isinstance(event, Removed):
            self._ring.remove(event.replica_id)


class Rendezvous(Stateless):
    name = "rendezvous"
    blind = True

    def __init__(self, parameters: NoParameters, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        available = fleet.available()
        if not available:
            return NONE_AVAILABLE
        if request.session is None:
            return Choice(self._rng.choice(available).id, "random")
        key = request.session
        return Choice(max(available, key=lambda r: xxh3_64_intdigest(f"{key}:{r.id}".encode())).id, "affinity")
