"""The replicas there are, what each serves, and what happens to them, told to the core as events.

Owns the table of replicas and their health (`health.py` decides, this applies). A replica enters the core once its
models are known: configured, or learnt from its /v1/models. A model or adapter stays known when the replicas that
served it are down or gone, so that a client can tell a typing error (404) from a fleet that is down (503); it is
forgotten when the last replica that lists it says, alive, that it does no more (an adapter was unloaded).
Trade-off: while a replica has never answered, an unknown model is answered 503, since it may be the one it serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from mypy_extensions import mypyc_attr

from gateway.health import FleetHealth
from gateway.replica import Replica
from gateway.sections import Health as HealthTable
from gateway.signals import Sign
from policies.model import Added, Draining, FleetEvent, Removed, Restarted, Scraped

OPERATOR = "operator"  # the usual reason to drain a replica


@dataclass(slots=True, frozen=True)
class Target:
    """What a request's `model` field means: a base model, or an adapter of one."""

    model: str
    adapter: str | None = None


@mypyc_attr(allow_interpreted_subclasses=True)
class Fleet:
    """`sink` receives each event for the core; `in_flight` answers how many requests of ours wait for a replica's
    engine, `silent` how many of its streams have begun and said nothing for so many seconds.
    """

    def __init__(
        self,
        health: HealthTable,
        sink: Callable[[FleetEvent], None],
        in_flight: Callable[[str], int] = lambda _: 0,
        clock: Callable[[], float] = time.monotonic,
        silent: Callable[[str, float], int] = lambda _, __: 0,
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.health = FleetHealth(health)
        self.in_flight = in_flight
        self.silent = silent
        self.awaited: set[str] = set()  # sources of replicas that have not said yet which there are
        self.version = 0  # moves when replicas or models change, for caches of the merged list
        self._sink = sink
        self._clock = clock
        self.known: dict[str, Target] = {}
        self._document = (-1, b"")

    # -- what the data path asks -------------------------------------------------------------------------------

    def get(self, replica_id: str) -> Replica | None:
        return self.replicas.get(replica_id)

    def resolve(self, model: str) -> Target | None:
        """What the name means; None for a name that no replica ever served (404 when `complete`, else 503)."""
        return self.known.get(model)

    def serving(self, model: str) -> list[Replica]:
        """Replicas that have the model or adapter, available or not."""
        return [r for r in self.replicas.values() if model in r.models]

    @property
    def complete(self) -> bool:
        """Whether every replica and its models are known, so that an unknown model is the client's mistake."""
        return bool(self.replicas) and not self.awaited and all(r.learnt for r in self.replicas.values())

    def available(self, replica_id: str) -> bool:
        replica = self.replicas.get(replica_id)
        return replica is not None and not replica.draining and replica.learnt and self.health.available(replica_id)

    def any_available(self) -> str | None:
        """Some replica that can answer a request which needs no particular one; None when there is none."""
        return next((id for id in self.replicas if self.available(id)), None)

    def observed(self, replica_id: str, sign: Sign) -> None:
        """What an attempt showed about its replica."""
        now = self._clock()
        if sign is not Sign.OK or not self.health.well(replica_id, now):
            self._emit(self.health.sign(replica_id, sign, now))

    def models_document(self) -> bytes:
        """GET /v1/models merged over the fleet: the first replica's row for each name, in order of addition."""
        if self._document[0] != self.version:
            rows: dict[str, Mapping[str, Any]] = {}
            for replica in self.replicas.values():
                for model in replica.models.values():
                    rows.setdefault(model.id, model.document or {"id": model.id, "object": "model", "owned_by": "vllm"})
            self._document = (self.version, orjson.dumps({"object": "list", "data": list(rows.values())}))
        return self._document[1]

    # -- what changes it ---------------------------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        """Raises ValueError for an id that is taken."""
        if replica.id in self.replicas:
            raise ValueError(f'replica "{replica.id}" is there already')
        self.replicas[replica.id] = replica
        self.health.add(replica.id, self._clock())
        self.version += 1
        if replica.learnt:
            self._announce(replica)

    def remove(self, replica_id: str) -> None:
        """Raises KeyError for an unknown id."""
        replica = self.replicas.pop(replica_id)
        self.version += 1
        after = self.health.remove(replica_id, self._clock())
        if replica.learnt:
            self._sink(Removed(replica_id))
        self._emit(after)

    def drain(self, replica_id: str, draining: bool = True, why: str = OPERATOR) -> None:
        """No new requests while there is a reason; what runs there finishes. Raises KeyError for an unknown id."""
        replica = self.replicas[replica_id]
        before = replica.draining
        (replica.drained_by.add if draining else replica.drained_by.discard)(why)
        if replica.draining == before:
            return
        self.version += 1
        self._emit(self.health.drain(replica_id, replica.draining, self._clock()))
        if replica.learnt:
            self._sink(Draining(replica_id, replica.draining))

    def alter(self, replica_id: str, url: str, weight: float, role: str) -> None:
        """The same replica at another address, or with another weight or part. Its cache is believed in until the
        next scrape, which has to show the same process. Raises KeyError for an unknown id.
        """
        replica = self.replicas[replica_id]
        if replica.url != url:
            replica.url = url
            self.health.moved(replica_id)
        if (replica.weight, replica.role) != (weight, role):
            replica.weight, replica.role = weight, role
            if replica.learnt:
                self._announce(replica)
        self.version += 1

    def learn(self, replica_id: str, rows: list[Mapping[str, Any]]) -> None:
        """A replica's /v1/models was read."""
        replica = self.replicas.get(replica_id)
        before = set() if replica is None else set(replica.models)
        if replica is not None and replica.learn(rows):
            self.version += 1
            for name in before - set(replica.models):
                if not self.serving(name):  # taken away on purpose: it was not a replica that went
                    self.known.pop(name, None)
            self._announce(replica)

    def probed(self, replica_id: str, failure: Sign | None) -> None:
        """A replica's /health was read; None is a good answer."""
        self._emit(self.health.probed(replica_id, failure, self._clock()))

    def canaried(self, replica_id: str, failure: Sign | None) -> None:
        """An ejected replica was asked for one token; None is a token that came."""
        self._emit(self.health.canaried(replica_id, failure, self._clock()))

    def scraped(self, values: Scraped) -> bool:
        """A replica's /metrics was read: heartbeat, sleep, restart, and the values for the core. True: it restarted."""
        if values.replica_id not in self.replicas:
            return False
        now = self._clock()
        silent = self.silent(values.replica_id, self.health.settings.hang_s) if values.engines else 0
        events, restarted = self.health.scraped(values, self.in_flight(values.replica_id), now, silent)
        if restarted and self.replicas[values.replica_id].learnt:
            self._sink(Restarted(values.replica_id))
        if self.replicas[values.replica_id].learnt:
            self._sink(values)
        self._emit(events)
        return restarted

    def wake(self) -> None:
        """Time passed: ends of back-off, and what panic mode has to reconsider."""
        self._emit(self.health.wake(self._clock()))

    def _announce(self, replica: Replica) -> None:
        for model in replica.models.values():
            self.known[model.id] = Target(model.parent, model.id) if model.parent else Target(model.id)
        self._sink(
            Added(
                replica.id,
                models=replica.base_models,
                adapters=replica.adapters,
                weight=replica.weight,
                role=replica.role,
                slow_start_s=replica.slow_start_s,
            )
        )
        if replica.draining:
            self._sink(Draining(replica.id))
        calmed = self.health.serves(replica.id, replica.base_models, self._clock())
        self._emit([*self.health.announced(replica.id), *calmed])

    def _emit(self, events: Iterable[FleetEvent]) -> None:
        for event in events:
            replica = self.replicas.get(getattr(event, "replica_id", ""))
            if replica is not None and replica.learnt:  # the core knows only announced replicas
                self._sink(event)
