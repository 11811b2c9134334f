"""Load registers: what each gateway has on each replica, written by itself alone and expiring by itself.

Every `register_s` a gateway writes one key of its own (requests in flight, prefill backlog and KV tokens of each
replica, GPU seconds served to each class, open requests of each tenant, arrivals and refusals) and reads everybody
else's, in one script and one round trip. One writer per key: nothing to race for and no counter to leak; a gateway that
dies is gone after `expiry_s`. Service of others counts in the shares between classes like our own, so that shares hold
over all gateways.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.scheduler import Scheduler
from gateway.shared.store import Command, Store
from gateway.tenants import Tenants
from policies.model import PeerLoad

# KEYS: the set of gateways, our register. ARGV: our id, our register, expiry in ms, what keys of registers begin with.
EXCHANGE = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[3])
local out = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, 255)) do
  if id ~= ARGV[1] then
    local said = redis.call('GET', ARGV[4] .. id)
    if said then out[#out + 1] = id; out[#out + 1] = said end
  end
end
return out
"""

MOST = 1e12  # of anything that a gateway counts
NO_REGISTER = (AttributeError, IndexError, KeyError, TypeError, ValueError)
log = logging.getLogger("forebay.shared")


def read(said: bytes) -> Mapping[str, Any]:
    """A register as it was written, all of it of the types and sizes that it has. Raises one of NO_REGISTER."""
    told = orjson.loads(said)
    return {
        **told,
        "load": {replica: _row(row) for replica, row in told["load"].items()},
        "served": {lane: _amount(total) for lane, total in told["served"].items()},
        "demand": _amount(told["demand"]),
        "open": {tenant: int(_amount(count)) for tenant, count in told["open"].items()},
    }


def _row(row: Sequence[Any]) -> Sequence[Any]:
    running, backlog, kv, live, near, slack, spent_s, parked_s = (*row, 0.0, 0.0)[:8]  # older ones say less, newer more
    amounts = (_amount(backlog), _amount(kv), int(_amount(live)), int(_amount(near)))
    slack_s = None if slack is None else math.copysign(_amount(abs(slack)), slack)
    return (int(_amount(running)), *amounts, slack_s, _amount(spent_s), _amount(parked_s))


def _amount(value: Any) -> float:
    if type(value) not in (int, float) or not 0.0 <= value <= MOST:
        raise ValueError(f"no amount, but {type(value).__name__}")
    return float(value)


class Registers:
    """`peers`: the other gateways heard of last; `tenants_open`: requests they have open, by tenant."""

    def __init__(self, store: Store, me: str, scheduler: Scheduler) -> None:
        self.peers: dict[str, Mapping[str, Any]] = {}
        self.tenants_open: dict[str, int] = {}
        self._store = store
        self._me = me
        self._scheduler = scheduler
        self._told: set[str] = set()  # replicas of which the core believes that others have something there
        self._served: dict[tuple[str, str], float] = {}  # (gateway, lane): what it had served when it was heard last
        self._spent: dict[tuple[str, str], float] = {}  # (gateway, replica): prefill seconds it had sent there then
        self._garbled: set[str] = set()  # gateways whose register cannot be read

    def command(self, tenants: Tenants) -> Command:
        balancer, now = self._scheduler.balancer, self._scheduler.clock()
        said = {
            "load": balancer.loads(now),
            "served": {f"{model}\n{name}": s for (model, name), s in balancer.served().items()},
            "demand": round(balancer.demand(now), 4),
            "prices": balancer.overload(),
            "open": {tenant.name: tenant.open for tenant in tenants.by_name.values() if tenant.open},
        }
        key = self._store.key
        expiry_ms = round(self._store.table.expiry_s * 1000)
        keys = (key("gateways"), key("load", self._me))
        return ("EVAL", EXCHANGE, 2, *keys, self._me, orjson.dumps(said), expiry_ms, key("load", ""))

    def heard(self, answer: list[bytes]) -> None:
        """Everybody else's registers."""
        scheduler, now = self._scheduler, self._scheduler.clock()
        sums: dict[str, PeerLoad] = {}
        self.peers, self.tenants_open = {}, defaultdict(int)
        garbled: set[str] = set()
        for id, said in zip(answer[::2], answer[1::2], strict=True):
            name = id.decode("utf-8", "replace")
            try:
                told = read(said)
                if "prices" in told:  # older ones do not tell, or in other words
                    scheduler.balancer.overloaded_elsewhere(name, told["prices"], now)
            except NO_REGISTER as error:  # of another program, or of a release that says it in other words
                garbled.add(name)
                if name not in self._garbled:
                    log.warning("what gateway %s says of itself cannot be read and does not count: %r", name, error)
            else:
                self.peers[name] = told
                self._count(name, told, sums, now)
        self._garbled = garbled
        scheduler.balancer.gateways(self.peers.keys())
        for known in (self._served, self._spent):
            for gone in [key for key in known if key[0] not in self.peers]:
                del known[gone]
        scheduler.balancer.shared_with(sum(said["demand"] for said in self.peers.values()), now)
        for replica in self._told - sums.keys():
            scheduler.fleet_event(PeerLoad(replica, at=now))
        for load in sums.values():
            scheduler.fleet_event(load)
        self._told = set(sums)

    def _count(self, id: str, told: Mapping[str, Any], sums: dict[str, PeerLoad], now: float) -> None:
        for replica, (running, backlog, kv, live, near, slack, spent_s, parked_s) in told["load"].items():
            more_s = self._more(id, replica, spent_s)
            one = PeerLoad(replica, running, backlog, kv, now, live, near, slack, more_s, parked_s)
            sums[replica] = one if replica not in sums else sums[replica].plus(one)
        for tenant, count in told["open"].items():
            self.tenants_open[tenant] += count
        self._serve(id, told["served"], now)

    def alone(self) -> None:
        """Nobody is heard of any more."""
        self.peers = {}
        self.tenants_open = {}
        self._scheduler.balancer.shared_with(0.0, self._scheduler.clock())
        self._scheduler.balancer.gateways(set())
        for replica in self._told:
            self._scheduler.fleet_event(PeerLoad(replica, at=self._scheduler.clock()))
        self._told = set()

    def _more(self, id: str, replica: str, spent_s: float) -> float:
        """Prefill seconds that a gateway sent to a replica since it was heard last."""
        before = self._spent.get((id, replica))
        self._spent[id, replica] = spent_s
        return 0.0 if before is None else max(0.0, spent_s - before)  # below: it started anew

    def _serve(self, id: str, served: Mapping[str, float], now: float) -> None:
        for lane, total in served.items():
            before = self._served.get((id, lane))
            self._served[id, lane] = total
            if before is not None and total > before:  # what it served before we met is history
                model, _, name = lane.partition("\n")
                self._scheduler.balancer.served_elsewhere(model, name, total - before, now)
