"""Several policies over one ledger: each request is decided by its arm's policy, and every policy hears all events.

To the core it is one policy like any other, so nothing there knows of experiments. Policies that keep their own picture
of the fleet (text trees, sticky tables) see every dispatch, whoever decided it, since the caches they picture are
shared too. In a partition a policy sees only the replicas of its request's group; when none of them is up it sees
all: an experiment must not refuse what the fleet can serve. Trade-off: blind policies take the fast lane only when
all arms are blind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from policies.model import Added, Choice, FleetView, PolicyEvent, Removed, Request
from policies.policy import RoutingPolicy, listens


class PartView(FleetView):
    """The part of a fleet that one group is."""

    __slots__ = ("whole",)

    def __init__(self, whole: FleetView, group: frozenset[str]) -> None:
        super().__init__([view for view in whole.replicas if view.id in group])
        self.whole = whole

    def refresh(self) -> None:
        """For the request that `whole` was shown for last."""
        self.show([view for view in self.replicas if view.available])
        self.rank_by(self.whole.rank)


class SideBySide:
    """`arms`: policy by arm name. `groups` divides replica ids, for a partition; None: all for all."""

    name = "experiment"

    def __init__(
        self,
        arms: Mapping[str, RoutingPolicy],
        control: str,
        groups: Callable[[list[str]], list[list[str]]] | None = None,
        also: RoutingPolicy | None = None,
    ) -> None:
        """also: a policy that only listens, to be ready when the experiment is over."""
        self.arms = dict(arms)
        self.control = self.arms[control]
        distinct = {id(policy): policy for policy in (*self.arms.values(), *([] if also is None else [also]))}
        self._ears = [policy for policy in distinct.values() if listens(policy)]
        self._grouping = groups
        self._replicas: list[str] = []
        self._groups: list[frozenset[str]] = []
        self._views: dict[tuple[int, int], PartView] = {}
        self.blind = groups is None and all(getattr(policy, "blind", False) for policy in self.arms.values())

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        policy = self.arms.get(request.arm or "", self.control)
        if self._grouping is not None:
            fleet = self._part(request, fleet)
        return policy.choose(request, fleet, now)

    def observe(self, event: PolicyEvent, now: float) -> None:
        if isinstance(event, Added | Removed) and self._grouping is not None:
            known = set(self._replicas) - {event.replica_id}
            if isinstance(event, Added):
                known.add(event.replica_id)
            self._replicas = sorted(known)
            self._groups = [frozenset(group) for group in self._grouping(self._replicas)]
            self._views.clear()
        for policy in self._ears:
            policy.observe(event, now)

    def _part(self, request: Request, fleet: FleetView) -> FleetView:
        group = request.group
        if group is None or request.pinned is not None or not 0 <= group < len(self._groups):
            return fleet
        key = (id(fleet), group)
        view = self._views.get(key)
        if view is None or view.whole is not fleet:
            if len(self._views) > 256:  # pools are made anew whenever the fleet changes
                self._views.clear()
            view = self._views[key] = PartView(fleet, self._groups[group])
        view.refresh()
        return view if view.available() else fleet
