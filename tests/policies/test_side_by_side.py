"""Two policies over one ledger: each decides its own requests, all hear everything."""

from __future__ import annotations

import random

from policies.core import Balancer
from policies.designs import Design, Plan
from policies.model import Added, Choice, Dispatch, Ejected, FleetView, PolicyEvent, Removed, Request
from policies.registry import make
from policies.settings import Settings
from policies.side_by_side import SideBySide


class First:
    """The first that is available; remembers whom it saw."""

    name = "first"

    def __init__(self) -> None:
        self.saw: list[list[str]] = []
        self.heard: list[str] = []

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        names = [view.id for view in fleet.available()]
        self.saw.append(names)
        return Choice(names[0] if names else None)

    def observe(self, event: PolicyEvent, now: float) -> None:
        self.heard.append(type(event).__name__)


def core(policy: SideBySide, replicas: int = 4) -> Balancer:
    balancer = Balancer([], policy, Settings().without_science(), random.Random(0))
    for i in range(replicas):
        balancer.fleet_event(Added(f"r{i}"), 0.0)
    return balancer


def sent(balancer: Balancer, request: Request) -> str:
    (decision,) = balancer.submit(request, 1.0)
    assert isinstance(decision, Dispatch)
    return decision.replica_id


def test_each_arm_decides_its_own_requests_and_every_policy_hears_all() -> None:
    one, two, resting = First(), First(), First()
    balancer = core(SideBySide({"control": one, "new": two}, "control", also=resting))
    for i in range(6):
        sent(balancer, Request(f"{i}", arm="new" if i % 3 == 0 else "control"))
    assert (len(one.saw), len(two.saw), len(resting.saw)) == (4, 2, 0)
    assert one.heard == two.heard == resting.heard
    assert one.heard.count("Dispatched") == 6
    assert balancer.fleet.replicas["r0"].ledger.in_flight == 6  # one ledger


def test_a_request_without_an_arm_or_of_one_that_is_gone_is_the_controls() -> None:
    one, two = First(), First()
    balancer = core(SideBySide({"control": one, "new": two}, "control"))
    sent(balancer, Request("1"))
    sent(balancer, Request("2", arm="of yesterday"))
    assert (len(one.saw), len(two.saw)) == (2, 0)


def test_a_policy_of_both_arms_hears_once() -> None:
    same = First()
    balancer = core(SideBySide({"a": same, "b": same}, "a", also=same))
    sent(balancer, Request("1", arm="b"))
    assert same.heard.count("Dispatched") == 1


def test_in_a_partition_an_arm_sees_its_group_alone() -> None:
    plan = Plan("x", Design.PARTITION, ("a", "b"), (1.0, 1.0), 5, 0.0)
    one, two = First(), First()
    balancer = core(SideBySide({"a": one, "b": two}, "a", plan.groups))
    left, right = (sorted(group) for group in plan.groups([f"r{i}" for i in range(4)]))
    assert sent(balancer, Request("1", arm="a", group=0)) in left
    assert sent(balancer, Request("2", arm="b", group=1)) in right
    assert sorted(one.saw[0]) == left
    assert sorted(two.saw[0]) == right


def test_a_group_that_is_down_does_not_take_its_requests_along() -> None:
    plan = Plan("x", Design.PARTITION, ("a", "b"), (1.0, 1.0), 5, 0.0)
    one = First()
    balancer = core(SideBySide({"a": one, "b": First()}, "a", plan.groups))
    left, right = plan.groups([f"r{i}" for i in range(4)])
    for name in left:
        balancer.fleet_event(Ejected(name), 1.0)
    assert sent(balancer, Request("1", arm="a", group=0)) in right


def test_groups_are_dealt_anew_when_a_replica_goes() -> None:
    plan = Plan("x", Design.PARTITION, ("a", "b"), (1.0, 1.0), 5, 0.0)
    one = First()
    balancer = core(SideBySide({"a": one, "b": First()}, "a", plan.groups), replicas=3)
    balancer.fleet_event(Removed("r0"), 1.0)
    assert sent(balancer, Request("1", arm="a", group=0)) == plan.groups(["r1", "r2"])[0][0]


def test_the_fast_lane_stays_when_all_arms_are_blind() -> None:
    blind = [make(name, None, random.Random(0)) for name in ("round_robin", "least_request")]
    assert SideBySide({"a": blind[0], "b": blind[1]}, "a").blind
    assert not SideBySide({"a": blind[0], "b": make("least_work", None, random.Random(0))}, "a").blind
