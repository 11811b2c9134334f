"""What all gateways know of the running experiment, and how two that know different things come to know the same.

`joined` takes what is common to both: arms that one of them stopped are stopped, an end is an end, the last weighing
holds, and of two experiments the one that was started last. It may be asked in any order and again with the same
answer, so gateways that were cut off and changed things alone agree as soon as they hear of each other. An experiment
that two were told to start, each by its own file or operator, is one: the earlier start holds.
Trade-off: an end cannot be taken back; the same table started again is another experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.experiment_table import Experiment


@dataclass(slots=True, frozen=True)
class Announcement:
    """Times in unix seconds. `stopped`: reasons by arm."""

    id: str
    table: Experiment
    started_unix: float
    weights: tuple[float, ...]
    weighed_unix: float  # 0: never since the start
    moved_unix: float  # of the last weighing or stop: counting begins anew
    stopped: Mapping[str, str]
    ended_unix: float | None
    ended_why: str

    @property
    def running(self) -> bool:
        return self.ended_unix is None

    def document(self) -> dict[str, Any]:
        """Plain values, as `read` takes them."""
        names = ("id", "started_unix", "weights", "weighed_unix", "moved_unix", "stopped", "ended_unix", "ended_why")
        return {"table": self.table.model_dump(), **{name: getattr(self, name) for name in names}}


def read(said: Mapping[str, Any]) -> Announcement:
    """Raises KeyError, TypeError or ValueError for what `Announcement.document` did not write."""
    ended = said["ended_unix"]
    return Announcement(
        str(said["id"]),
        Experiment.model_validate(said["table"]),
        float(said["started_unix"]),
        tuple(float(w) for w in said["weights"]),
        float(said["weighed_unix"]),
        float(said["moved_unix"]),
        {str(arm): str(why) for arm, why in said["stopped"].items()},
        None if ended is None else float(ended),
        str(said["ended_why"]),
    )


def alike(a: Experiment, b: Experiment) -> bool:
    """The same but for weights."""
    return _but_weights(a) == _but_weights(b)


def same(a: Announcement, b: Announcement) -> bool:
    """Whether both speak of one experiment."""
    return a.id == b.id or (a.running and b.running and alike(a.table, b.table))


def joined(a: Announcement, b: Announcement) -> Announcement:
    """What both know together; `joined(a, b) == joined(b, a)`."""
    if not same(a, b):
        return max(a, b, key=_age)
    first, weighed = min(a, b, key=_age), max(a, b, key=lambda x: (x.weighed_unix, x.weights))
    if not max(a.weighed_unix, b.weighed_unix):
        weighed = first
    ends = [(x.ended_unix, x.ended_why) for x in (a, b) if x.ended_unix is not None]
    ended_unix, ended_why = min(ends, default=(None, ""))
    reasons = sorted([*a.stopped.items(), *b.stopped.items()], reverse=True)  # of two reasons the first in order
    return replace(
        first,
        table=weighed.table,
        weights=weighed.weights,
        weighed_unix=weighed.weighed_unix,
        moved_unix=max(a.moved_unix, b.moved_unix),
        stopped=dict(reasons),
        ended_unix=ended_unix,
        ended_why=ended_why,
    )


def _age(said: Announcement) -> tuple[float, str]:
    return said.started_unix, said.id


def _but_weights(table: Experiment) -> dict[str, Any]:
    shown = table.model_dump()
    return {**shown, "arms": [{**arm, "weight": 1.0} for arm in shown["arms"]]}
