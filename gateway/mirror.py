"""The fleet as the core last told it, for a hand: what exists, what it serves, who may be dispatched to.

The core alone probes, scrapes and ejects; what a hand's attempts show about a replica is told to it. While no core
answers, the last view stays, and a replica that shows a hard sign is left out for a while here as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from gateway.fleet import Fleet, Target
from gateway.replica import Model, Replica
from gateway.sections import Health
from gateway.signals import HARD, Sign

LEFT_OUT_S = 2.0
View = Sequence[Any]


def view(fleet: Fleet) -> View:
    """What a hand has to know, as plain values. Keys of replicas are among them: it goes to our own processes only."""
    rows = []
    for r in fleet.replicas.values():
        models = [(m.id, m.parent, m.max_model_len, m.document) for m in r.models.values()]
        state = (models, r.learnt, sorted(r.drained_by), fleet.available(r.id))
        rows.append((r.id, r.url, r.key, r.ca_file, *state))
    known = {name: (target.model, target.adapter) for name, target in fleet.known.items()}
    return rows, known, sorted(fleet.awaited)


class Mirror(Fleet):
    """`tell` hears of every bad sign; a good one goes without saying, with what the core is told of its request.
    Nothing here decides about health."""

    def __init__(
        self,
        tell: Callable[[str, Sign], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(Health(), lambda _: None, clock=clock)
        self._tell = tell
        self._open: frozenset[str] = frozenset()
        self._left_out: dict[str, float] = {}
        self.alone = False  # no core answers
        self.seen: View = ((), {}, ())  # as it was told last

    def show(self, seen: View) -> None:
        """Takes a view; what did not change keeps its object."""
        rows, known, awaited = seen
        self.seen = seen
        replicas: dict[str, Replica] = {}
        available = set()
        for id, url, key, ca_file, models, learnt, drained_by, open_ in rows:
            made = self.replicas.get(id)
            if made is None or (made.key, made.ca_file) != (key, ca_file):
                made = Replica(id, url, key, ca_file)
            made.url = url
            made.models = {row[0]: Model(*row) for row in models}
            made.learnt, made.drained_by = learnt, set(drained_by)
            replicas[id] = made
            if open_:
                available.add(id)
        self.awaited = set(awaited)
        self.replicas = replicas
        self.known = {name: Target(*target) for name, target in known.items()}
        self._open = frozenset(available)
        self.version += 1

    def available(self, replica_id: str) -> bool:
        if replica_id not in self._open:
            return False
        return not self.alone or self._clock() >= self._left_out.get(replica_id, 0.0)

    def observed(self, replica_id: str, sign: Sign) -> None:
        if sign in HARD and self.alone:
            self._left_out[replica_id] = self._clock() + LEFT_OUT_S
        if sign is not Sign.OK:
            self._tell(replica_id, sign)
