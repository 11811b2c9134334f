"""What the core knows of each replica, and which replicas serve which model.

One mutable owner: the core. The `ReplicaView` objects are made once per replica and refreshed in place for each
decision (`sight.py`), because at 64 replicas making them anew costs more than the decision itself.
"""

from __future__ import annotations

from typing import Final

from policies.kv import KVHeadroom
from policies.ledger import WorkLedger
from policies.model import Added, FleetView, PeerLoad, Pulse, ReplicaView, Request, Scraped
from policies.pacing import Pace
from policies.predictor import DecodeFit, PrefillFit
from policies.residence import Residence
from policies.settings import Settings
from policies.tracked import Tracked

LAG_S: Final = 0.2  # how long ago what other gateways just said they sent may have been sent
PEERS_STALE_S: Final = 2.0  # what another gateway said this long ago counts no more
EARLY: Final = 16  # samples of the fleet up to which every replica settles after each


class Replica:
    """State of one replica. `open` is what may be dispatched to, panic mode applied."""

    __slots__ = (
        "adapters_served", "added_at", "awaited", "closed_until", "decode", "draining", "ejected", "engine_ttft_s",
        "fill", "group", "id", "kv", "ledger", "models", "pace", "parked_s", "peers", "prefill", "pulsed",
        "residence", "scraped", "service_s", "slot", "slow_start_s", "statistical", "ttft_s", "view",
    )  # fmt: skip

    def __init__(self, event: Added, slot: int, prior: PrefillFit, now: float) -> None:
        self.id = event.replica_id
        self.slot = slot  # in the prefix index
        self.ledger = WorkLedger()
        self.pace = Pace()
        self.kv = KVHeadroom(None if event.kv_capacity_tokens is None else float(event.kv_capacity_tokens))
        self.residence = Residence()
        hint = event.prefill_rate
        self.prefill = PrefillFit(hint or prior.rate, prior.overhead_s, hinted=hint is not None)
        if hint is None:
            self.prefill.adopt(prior)
        self.decode = DecodeFit()
        self.draining = self.ejected = self.statistical = False
        self.closed_until = float("-inf")  # it said it is full: nothing more until then
        self.added_at, self.slow_start_s = now, event.slow_start_s
        self.scraped: Scraped | None = None
        self.peers: PeerLoad | None = None
        self.pulsed = Pulse()  # what our own streams did last
        self.parked_s = 0.0  # prefill seconds of held requests that would go here
        self.awaited = 0  # how many of these do not only fill
        self.fill: dict[str, Tracked] = {}  # requests that only fill, sent here and not answered yet
        # of the request looked at last, in predicted seconds:
        self.service_s = 0.0  # its prefill alone
        self.engine_ttft_s = 0.0  # if it were dispatched now
        self.ttft_s = 0.0  # with the wait for the pace before that
        self.view = ReplicaView(event.replica_id)
        self.view.prefill_rate = self.prefill.rate
        self.described(event)
        self.changed(now)

    def described(self, event: Added) -> None:
        """What configuration says, at first and again when it changes."""
        self.models, self.adapters_served = event.models, event.adapters
        self.group = ",".join(sorted(event.models))  # it stands in for others of this group; empty: serves any model
        self.view.weight, self.view.role, self.view.adapters = event.weight, event.role, event.adapters

    def serves(self, request: Request) -> bool:
        """The adapter itself where one is asked for: its base model alone answers 404."""
        if request.pinned is not None and request.pinned != self.id:
            return False
        if not self.models:
            return True
        if request.adapter is not None:
            return request.adapter in self.adapters_served
        return request.model in self.models or request.model in self.adapters_served

    @property
    def down(self) -> bool:
        """Out for a reason that panic mode does not override."""
        asleep = self.scraped is not None and self.scraped.awake is False
        return self.draining or asleep or (self.ejected and not self.statistical)

    def ramp(self, now: float) -> float:
        """Share of its backlog a replica in slow start may take, 0.1..1: its caches and graphs are cold."""
        if self.slow_start_s <= 0.0 or now - self.added_at >= self.slow_start_s:
            return 1.0
        return max(0.1, (now - self.added_at) / self.slow_start_s)

    def changed(self, now: float) -> None:
        """Its ledger or its scrape changed: brings the parts of the view up to date that no request changes."""
        view, ledger, kv = self.view, self.ledger, self.kv
        if self.peers is None:
            view.in_flight = ledger.in_flight
        else:
            self.counted(now)
        view.live_decodes = ledger.live_decodes
        view.kv_tokens = reserved = ledger.kv_tokens
        view.kv_capacity_tokens = kv.capacity
        view.kv_free_tokens = kv.free(reserved, now)

    def counted(self, now: float) -> None:
        """The same for the one thing that a blind policy reads."""
        in_flight = self.ledger.in_flight
        if self.peers is not None and (peers := self.heard_of(now)) is not None:
            in_flight += peers.in_flight
        self.view.in_flight = in_flight

    def heard(self, peers: PeerLoad, now: float) -> None:
        """Other gateways say what they have here."""
        self.peers = peers
        if peers.prefill_backlog_tokens > 0.0 or peers.spent_s > 0.0:
            self.ledger.crowd(now - LAG_S)
        self.pace.spent_elsewhere(peers.spent_s, now)
        self.changed(now)

    def snapshot(self, now: float) -> dict[str, float | bool | None]:
        """Plain values for metrics; seconds, tokens, shares."""
        return {
            "available": not self.down and not self.ejected,
            "backlog_tokens": self.ledger.backlog(now),
            "backlog_s": self.ledger.backlog_s(now),
            "in_flight": self.ledger.in_flight,
            "live_decodes": self.ledger.live_decodes,
            "parked_s": self.parked_s,
            "prefill_rate": self.prefill.rate,
            "overhead_s": self.prefill.overhead_s,
            "pace_rate": self.pace.rate,
            "pace_closed_share": self.pace.closed_share,
            "decode_step_s": self.decode.idle_s,
            "prefill_step_s": self.decode.busy_s,
            "kv_capacity_tokens": self.kv.capacity,
            "kv_free_tokens": self.kv.free(self.ledger.kv_tokens, now),
        }

    @property
    def keeps_s(self) -> float:
        """How long a prefix that nobody uses stays cached here; infinite where that is not known."""
        return self.residence.seconds(self.kv.capacity)

    def peers_tokens(self, now: float) -> float:
        """Prefill tokens that other gateways have here, less what has drained since they said so."""
        peers = self.heard_of(now)
        if peers is None:
            return 0.0
        return max(0.0, peers.prefill_backlog_tokens - self.prefill.rate * (now - peers.at))

    def peers_s(self, now: float) -> float:
        """The same in seconds."""
        return 0.0 if self.peers is None else self.peers_tokens(now) / self.prefill.rate

    def peers_parked_s(self, now: float) -> float:
        """Prefill seconds of what other gateways hold for it."""
        peers = self.heard_of(now)
        return 0.0 if peers is None else peers.parked_s

    def heard_of(self, now: float) -> PeerLoad | None:
        """What other gateways have here, while that is fresh."""
        return self.peers if self.peers is not None and now - self.peers.at < PEERS_STALE_S else None

    def streams(self, now: float) -> bool:
        """Whether anybody's streams are live here."""
        if self.ledger.live_decodes > 0:
            return True
        return self.peers is not None and (peers := self.heard_of(now)) is not None and peers.live > 0

    def everyones(self, own: Pulse, now: float) -> Pulse:
        """Our pulse with the streams of other gateways in it: a replica is paced for all of them. Gaps stay our own."""
        peers = self.heard_of(now)
        if peers is None or not peers.live:
            return own
        slacks = [s for s in (own.least_slack_s, peers.least_slack_s) if s is not None]
        gaps = (own.idle_gaps, own.idle_gap_sum_s, own.busy_gaps, own.busy_gap_sum_s)
        return Pulse(own.live + peers.live, own.near + peers.near, min(slacks, default=None), *gaps)

    def ahead_s(self, now: float) -> float:
        """Prefill seconds that wait in its engine, of ours and of other gateways."""
        own = self.ledger.backlog_s(now)
        return own if self.peers is None else own + self.peers_tokens(now) / self.prefill.rate


class Pool:
    """The replicas that serve one model or adapter, in order of addition."""

    __slots__ = ("beside", "by_id", "group", "open", "replicas", "view", "whole")

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.view = FleetView([r.view for r in replicas])
        self.by_id = {r.id: r for r in replicas}
        self.open: list[Replica] = []  # may be dispatched to
        self.beside: list[tuple[Replica, bool]] = []  # each of `replicas`, and whether it is open
        self.group = replicas[0].group if replicas else ""
        self.whole: Pool = self  # what its load spreads over: all of its group, where this is a part of it

    def tariff(self) -> tuple[float, float]:
        """Seconds that prefill takes here per token and per token times context, on average."""
        fits, count = [r.prefill for r in self.open], max(1, len(self.open))
        return sum([f.per_token_s for f in fits], 0.0) / count, sum([f.per_context_s for f in fits], 0.0) / count

    def refresh(self, panic_share: float) -> None:
        up = [r for r in self.replicas if not r.down and not r.ejected]
        if len(up) < panic_share * len(self.replicas):
            # panic: a mostly ejected fleet is a wrong verdict, not a dead fleet
            up = [r for r in self.replicas if not r.down]
        self.open = up
        self.beside = [(r, r in up) for r in self.replicas]


class Fleet:
    """All replicas in order of addition, and the pools of those that serve one model or adapter."""

    def __init__(self, settings: Settings) -> None:
        self.replicas: dict[str, Replica] = {}
        self.panic_share = settings.panic_share
        self.prior = PrefillFit(settings.prior_prefill_rate, settings.prior_overhead_s)
        self._pools: dict[tuple[str, str | None, str | None], Pool] = {}

    def add(self, event: Added, slot: int, now: float) -> Replica:
        replica = self.replicas[event.replica_id] = Replica(event, slot, self.prior, now)
        self._pools.clear()
        return replica

    def learn(self, replica: Replica, tokens: float, context: float, seconds: float, latency: bool) -> None:
        """A prefill sample of one replica. The others settle with what the fleet knows by now, in turn: a replica that
        showed nothing yet must not look faster than those that did, nor one slower that got a bad first sample."""
        prior = self.prior
        prior.add(tokens, context, seconds, None, latency=latency)
        replica.prefill.add(tokens, context, seconds, prior, latency=latency)
        others = list(self.replicas.values())
        if prior.samples > EARLY:
            others = [others[prior.samples % len(others)]]
        for other in others:
            if other is not replica:
                other.prefill.settle(prior)

    def remove(self, replica_id: str) -> None:
        self._pools.clear()
        del self.replicas[replica_id]

    def pool(self, request: Request) -> Pool:
        key = (request.model, request.adapter, request.pinned)
        found = self._pools.get(key)
        if found is None:
            if len(self._pools) > 4096:  # names come from clients: bounded
                self._pools.clear()
            found = self._pools[key] = Pool([r for r in self.replicas.values() if r.serves(request)])
            found.refresh(self.panic_share)
            if request.adapter is not None or request.pinned is not None:
                found.whole = Pool([r for r in self.replicas.values() if r.group == found.group])
                found.whole.refresh(self.panic_share)
        return found

    def refresh(self) -> None:
        """Something about availability changed, or about who serves what."""
        self._pools.clear()
