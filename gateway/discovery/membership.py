"""Which replicas belong to the fleet: what every source says, laid together, and carried out without losing anything.

Each source tells its whole list each time. What is new is added once it is ready; what changed its address or weight is
altered in place; what no source names any more drains: nothing new goes there, and it is forgotten when its last
request has ended, or after `drain_s` (open streams go on even then); the last of a model goes on until who replaces it
is there. Who is who: a member is the same one as before if
its identity is (a pod's UID, else the id that an operator or an SRV record gave it, else host:port). One id with two
identities is two replicas, and the newer takes the name. Where an id stays and the address does not, the process start
that the engine reports has to confirm it (`Fleet.alter`), else its cache counts as lost.
Precedence: configuration, file, DNS, Kubernetes; one address is one replica, whoever names it first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gateway.fleet import Fleet
from gateway.replica import Replica, key_mistake
from gateway.sections import Replica as ReplicaTable

log = logging.getLogger("forebay.discovery")
CONFIGURATION = "configuration"
SOURCES = (CONFIGURATION, "file", "dns", "kubernetes")  # the first that names a replica decides
LOOK_S = 0.25  # between two looks at what drains
GONE, NOT_READY = "gone", "not ready"  # reasons to drain, beside an operator's


@dataclass(slots=True, frozen=True)
class Member:
    """One replica as a source names it. `identity` empty: its id is all that is known of it."""

    table: ReplicaTable
    identity: str = ""
    ready: bool = True

    @property
    def who(self) -> str:
        return self.identity or self.table.name


@dataclass(slots=True)
class Membership:
    """Owner of the lists. `in_flight` answers how many requests a replica has; `changed` follows each change."""

    fleet: Fleet
    in_flight: Callable[[str], int]
    changed: Callable[[], None]
    drain_s: float = 60.0
    slow_start_s: float = 0.0
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    clock: Callable[[], float] = time.monotonic
    lists: dict[str, tuple[Member, ...]] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)  # replica id: the source that names it
    leaving: dict[str, float] = field(default_factory=dict)  # replica id: when it is forgotten at the latest
    staying: set[str] = field(default_factory=set)  # of these, who serves on until another can
    _there: dict[str, Member] = field(default_factory=dict)
    _warned: frozenset[str] = frozenset()
    _timer: asyncio.TimerHandle | None = None

    def told(self, source: str, members: Iterable[Member]) -> list[str]:
        """A source's whole list. Answers one line per change, for the log and for people."""
        first = source not in self.lists  # what was there before us is not eased in
        self.lists[source] = tuple(members)
        wanted = self._merged()
        lines: list[str] = []
        for replica_id, (origin, member) in wanted.items():
            there = self._there.get(replica_id)
            if there is not None and (there.who != member.who or not alterable(there.table, member.table)):
                self._forget(replica_id)
                lines.append(f"replica {replica_id}: replaced by another of that name")
                there = None
            if there is None:
                if not member.ready:
                    continue
                self._add(member, 0.0 if first else self.slow_start_s)
                lines.append(f"replica {replica_id}: added at {member.table.url} ({origin})")
            else:
                self._alter(there, member, lines)
            self.origin[replica_id] = origin
        for replica_id in [r for r in self._there if r not in wanted]:
            self._leave(replica_id, lines)
        for line in lines:
            log.info("%s", line)
        if lines:
            self.changed()
        self._look_later()
        return lines

    def settle(self) -> None:
        """Forgets what has drained. Called by itself while anything drains."""
        now = self.clock()
        for replica_id in [r for r in self.staying if not self._needed(r)]:
            self.staying.discard(replica_id)
            self.fleet.drain(replica_id, True, GONE)
        done = [
            r for r, until in self.leaving.items() if now >= until or (r not in self.staying and not self.in_flight(r))
        ]
        for replica_id in done:
            left = self.in_flight(replica_id)
            self._forget(replica_id)
            log.info("replica %s: removed%s", replica_id, f"; {left} requests there go on" if left else "")
        if done:
            self.changed()
        self._look_later()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- steps ---------------------------------------------------------------------------------------------------

    def _merged(self) -> dict[str, tuple[str, Member]]:
        wanted: dict[str, tuple[str, Member]] = {}
        by_url: dict[str, str] = {}
        warnings: dict[str, None] = {}
        for source in SOURCES:
            for member in self.lists.get(source, ()):
                name, url = member.table.name, member.table.url
                if (wrong := key_mistake(member.table, self.environ)) is not None:
                    warnings[f"replica {name}: {source} names it, and it is left out; {wrong}"] = None
                elif name in wanted:
                    warnings[f"replica {name}: {source} names it, as {wanted[name][0]} does; the latter counts"] = None
                elif source != CONFIGURATION and url in by_url:
                    warnings[f"replica {name}: is at {url}, as {by_url[url]} is; taken for one replica"] = None
                else:
                    wanted[name] = (source, member)
                    by_url.setdefault(url, name)
        for line in warnings.keys() - self._warned:
            log.warning("%s", line)
        self._warned = frozenset(warnings)
        return wanted

    def _add(self, member: Member, slow_start_s: float) -> None:
        replica = Replica.of(member.table, self.environ)
        replica.slow_start_s = slow_start_s
        self.fleet.add(replica)
        self._there[replica.id] = member

    def _alter(self, there: Member, member: Member, lines: list[str]) -> None:
        replica_id = member.table.name
        self._there[replica_id] = member
        if self.leaving.pop(replica_id, None) is not None:
            self.staying.discard(replica_id)
            self.fleet.drain(replica_id, False, GONE)
            lines.append(f"replica {replica_id}: is back before it was gone")
        if there.ready != member.ready:
            self.fleet.drain(replica_id, not member.ready, NOT_READY)
            lines.append(f"replica {replica_id}: {'ready' if member.ready else 'not ready: gets nothing new'}")
        if there.table != member.table:
            self.fleet.alter(replica_id, member.table.url, member.table.weight, member.table.role)
            if there.table.url != member.table.url:
                lines.append(f"replica {replica_id}: moved from {there.table.url} to {member.table.url}")
            else:
                lines.append(f"replica {replica_id}: weight {member.table.weight:g}, role {member.table.role}")

    def _leave(self, replica_id: str, lines: list[str]) -> None:
        if replica_id in self.leaving:
            return
        if self._needed(replica_id):
            self.leaving[replica_id] = self.clock() + self.drain_s
            self.staying.add(replica_id)
            lines.append(f"replica {replica_id}: goes on until one that comes instead is there, then is removed")
        elif self.in_flight(replica_id):
            self.leaving[replica_id] = self.clock() + self.drain_s
            self.fleet.drain(replica_id, True, GONE)
            lines.append(f"replica {replica_id}: drains, then is removed")
        else:
            self._forget(replica_id)
            lines.append(f"replica {replica_id}: removed")

    def _needed(self, replica_id: str) -> bool:
        """Whether it is the last one to serve its models while another is about to come: a swap must leave no gap."""
        fleet = self.fleet
        if not fleet.available(replica_id):
            return False
        models = fleet.replicas[replica_id].base_models
        others = [r for r in fleet.replicas.values() if r.id not in self.leaving and r.id != replica_id]
        served = any(fleet.available(r.id) and r.base_models & models for r in others)
        return not served and any(not r.draining and not fleet.available(r.id) for r in others)

    def _forget(self, replica_id: str) -> None:
        self.leaving.pop(replica_id, None)
        self.staying.discard(replica_id)
        self.origin.pop(replica_id, None)
        del self._there[replica_id]
        self.fleet.remove(replica_id)

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.leaving:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self.settle)


def alterable(before: ReplicaTable, after: ReplicaTable) -> bool:
    """Whether a change can be made in place: address, weight and part; not how it is spoken to or what it serves."""
    fixed = ("models", "key_env", "ca_file")
    same = all(getattr(before, key) == getattr(after, key) for key in fixed)
    return same and before.url.partition(":")[0] == after.url.partition(":")[0]
