"""What the metrics count, fed by the end of each request and by what happens to replicas.

Apart from the page (`metrics.py`), which is read a few times a minute: this is called for every request, so it is
plain dictionaries, and can be compiled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from gateway.record import RequestRecord, TokenSource
from gateway.tally import CHOICES, REASONS, Tally, known
from policies.model import Ejected, FleetEvent, Outcome, Removed, Restarted, Returned

PRECISION_DECAY = 0.99  # weight of the past per request, so about the last hundred count
Counts: TypeAlias = defaultdict[tuple[str, ...], int]


class Counted:
    """One per gateway. Label values that are in no closed set count as "other"."""

    def __init__(self, classes: Iterable[str], tenants: Iterable[str]) -> None:
        self.classes = frozenset(classes)
        self.tenants = frozenset(tenants)
        self.tallies = {name: Tally() for name in self.classes}
        self.choices: Counts = defaultdict(int)
        self.by_policy: Counts = defaultdict(int)  # policy, arm of an experiment, partition
        self.by_tenant: Counts = defaultdict(int)  # tenant of the configuration, outcome
        self.attempts: Counts = defaultdict(int)
        self.ejections: Counts = defaultdict(int)
        self.returns: Counts = defaultdict(int)
        self.restarts: Counts = defaultdict(int)
        self.precision: dict[str, tuple[float, float]] = {}  # replica: cached tokens confirmed, believed
        self.retries = self.client_retries = 0

    def configure(self, classes: Iterable[str], tenants: Iterable[str]) -> None:
        """The names that labels may have from now on."""
        self.classes, self.tenants = frozenset(classes), frozenset(tenants)

    def record(self, r: RequestRecord) -> None:
        """A request is over."""
        tally = self.tallies.get(r.service_class)
        if tally is None:
            tally = self._tally(r.service_class)
        tally.count(r)
        if r.partition is not None:
            self.by_policy[r.policy, r.arm or "", r.partition] += 1
        if r.tenant is not None:
            self.by_tenant[known(r.tenant, self.tenants), str(r.outcome)] += 1
        self.client_retries += r.client_retry > 0
        if r.attempts:
            for attempt in r.attempts:
                outcome = "success" if attempt.outcome is Outcome.SUCCESS else str(attempt.outcome)
                self.attempts[attempt.replica_id, outcome, known(attempt.detail, REASONS)] += 1
            self.retries += len(r.attempts) - 1
            self.choices[r.policy, known(r.choice_reason, CHOICES)] += 1
            if r.prediction is not None and r.prediction.cached_tokens > 0:
                self._confirm(r, r.prediction.cached_tokens)

    def event(self, event: FleetEvent) -> None:
        """Something happened to a replica."""
        match event:
            case Ejected() if event.reason != "starting":  # it was never in
                self.ejections[event.replica_id, known(event.reason, REASONS)] += 1
            case Returned(half_open=True):
                self.returns[event.replica_id,] += 1
            case Restarted():
                self.restarts[event.replica_id,] += 1
            case Removed():
                self.forget(event.replica_id)

    def _tally(self, service_class: str) -> Tally:
        name = known(service_class, self.classes)
        return self.tallies.setdefault(name, Tally())

    def _confirm(self, r: RequestRecord, expected: int) -> None:
        """How much of what was believed to be cached was, on the replica that answered."""
        if r.cached.source is TokenSource.USAGE and r.cached.count is not None:
            replica_id = r.attempts[-1].replica_id
            confirmed, believed = self.precision.get(replica_id, (0.0, 0.0))
            confirmed = PRECISION_DECAY * confirmed + min(r.cached.count, expected)
            self.precision[replica_id] = (confirmed, PRECISION_DECAY * believed + expected)

    def forget(self, replica_id: str) -> None:
        for counts in (self.attempts, self.ejections, self.returns, self.restarts):
            for key in [k for k in counts if k[0] == replica_id]:
                del counts[key]
        self.precision.pop(replica_id, None)
