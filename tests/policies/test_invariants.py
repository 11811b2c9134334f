"""What must hold whatever happens: events in any order, late, twice or never, replicas that vanish and come back."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies import arms, binding
from policies.classes import BATCH, DEFAULT_CLASSES, INTERACTIVE, STANDARD, stamp
from policies.core import Balancer
from policies.designs import Design, Plan
from policies.model import (
    Abort,
    Added,
    Decision,
    Dispatch,
    Draining,
    Ejected,
    Hold,
    Outcome,
    PeerLoad,
    Pulse,
    Removed,
    Request,
    Restarted,
    Returned,
    Scraped,
    Shed,
    Usage,
)
from policies.policy import RoutingPolicy
from policies.registry import make
from policies.shadow import Shadowing, Tally
from policies.side_by_side import SideBySide

NAMES = ("a", "b", "c")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit"] * 6 + ["first", "first", "complete", "complete", "fail", "cancel", "pulse", "wait", "wait"]
            + ["eject", "return", "drain", "undrain", "remove", "add", "restart", "scrape", "peers", "configure"]
        ),
        st.integers(0, 999),
    ),
    max_size=60,
)  # fmt: skip
ARMS = st.sampled_from(
    [
        "forebay",
        "round_robin",
        "least_work+admission",
        "lmetric+pacing",
        "least_request+admission+pacing",
        "experiment",
        "experiment+admission+pacing",
    ]
)
COMMON = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Shell:
    """Drives a balancer as the gateway does and keeps books of its own."""

    balancer: Balancer
    now: float = 0.0
    made: int = 0
    held: dict[str, Request] = field(default_factory=dict)
    out: dict[str, tuple[Request, str]] = field(default_factory=dict)  # dispatched: where
    ended: dict[str, str] = field(default_factory=dict)
    ejected: set[str] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)
    present: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)  # dispatched to a replica that is gone
    returned: dict[str, int] = field(default_factory=dict)  # how often each was taken back
    log: list[Decision] = field(default_factory=list)

    def take(self, decisions: list[Decision], new: Request | None = None) -> None:
        self.log += decisions
        pending = {} if new is None else {new.id: new}
        for d in decisions:
            request = pending.pop(d.request_id, None) or self.held.get(d.request_id)
            match d:
                case Dispatch():
                    assert request is not None, "only a request that waits or has just come can be dispatched"
                    assert d.replica_id in self.present
                    assert d.replica_id not in self.ejected | self.drained
                    self.held.pop(d.request_id, None)
                    self.out[d.request_id] = (request, d.replica_id)
                case Hold():
                    assert request is not None
                    self.held[d.request_id] = request
                case Shed():
                    assert request is not None
                    assert d.retry_after_s is not None
                    assert d.retry_after_s > 0.0
                    self.held.pop(d.request_id, None)
                    self.end(d.request_id, d.reason)
                case Abort():
                    request, _ = self.out[d.request_id]
                    if d.requeue:
                        del self.out[d.request_id]
                        self.lost.discard(d.request_id)
                        self.returned[d.request_id] = self.returned.get(d.request_id, 0) + 1
                        assert self.returned[d.request_id] <= binding.TAKEN_BACK, "work is not thrown away for ever"
                        self.held[d.request_id] = request
        assert not pending, "submit decides about the new request"
        self.check()

    def end(self, name: str, how: str) -> None:
        assert name not in self.ended, "a request ends once"
        self.ended[name] = how

    def check(self) -> None:
        for name, replica in self.balancer.fleet.replicas.items():
            there = sum(1 for i, (_, where) in self.out.items() if where == name and i not in self.lost)
            assert replica.ledger.in_flight == there
            assert self.balancer.backlog_tokens(name, self.now) >= 0.0
            assert 0 <= replica.ledger.live_decodes <= there
            assert replica.parked_s >= 0.0
            waiting = [t for t in self.balancer.binding.queue.everything() if t.preferred is replica]
            assert replica.awaited == sum(not t.service_class.fill_only for t in waiting)
            if there == 0:
                assert self.balancer.backlog_tokens(name, self.now) == 0.0
                assert not replica.ledger.prefilling  # others may be
                assert replica.ledger.kv_tokens == 0.0
        assert self.balancer.binding.queue.count == len(self.held)
        assert self.made == len(self.held) + len(self.out) + len(self.ended)

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        for _ in range(10_000):
            wake = self.balancer.next_wake()
            if wake is None or wake > until:
                break
            self.now = max(self.now, wake)
            self.take(self.balancer.wake(self.now))
        else:
            raise AssertionError("the core wakes without end")
        self.now = until
        self.take(self.balancer.wake(self.now))
        for request in self.held.values():
            for deadline in (request.ttft_deadline, request.deadline):
                assert deadline is None or self.now <= deadline + 1e-6, "a held request leaves by its deadline"

    def step(self, what: str, n: int) -> None:
        b, name = self.balancer, NAMES[n % 3]
        flying = sorted(self.out)
        known = sorted(self.held) + flying + sorted(self.ended)
        pick = flying[n % len(flying)] if flying else "nobody"
        match what:
            case "submit":
                tokens = 100 + 37 * n
                chain = tuple(1000 * (n % 7) + i for i in range(tokens // 64))
                request = Request(
                    f"r{self.made}", tenant=f"t{n % 2}", session=f"s{n % 5}", received_at=self.now,
                    prompt_bytes=4 * tokens, prompt_tokens=tokens, chain=chain,
                    streams=n % 4 != 0, generates=n % 11 != 0,
                    arm=("a", "b", None)[n % 3], group=n % 2,
                )  # fmt: skip
                stamp(request, (INTERACTIVE, STANDARD, BATCH)[n % 3])
                self.made += 1
                self.take(b.submit(request, self.now), request)
            case "first":
                for _ in range(1 + n % 2):  # sometimes told twice
                    self.take(b.first_token(pick, self.now))
            case "complete":
                request_id = known[n % len(known)] if known else "nobody"
                self.finish(request_id, Outcome.SUCCESS, Usage(500, 20, 100 if n % 2 else None))
            case "cancel":
                request_id = known[n % len(known)] if known else "nobody"
                self.finish(request_id, Outcome.CANCELLED, None)
            case "fail":
                if pick in self.out:
                    request, _ = self.out.pop(pick)
                    self.lost.discard(pick)
                    outcome = Outcome.BACKPRESSURE if n % 2 else Outcome.ERROR
                    self.take(b.failed(pick, outcome, self.now), request)
                else:
                    assert b.failed(pick, Outcome.ERROR, self.now) == []
            case "pulse":
                self.take(b.pulse(name, Pulse(10, n % 4, 0.01, 5, 0.1, n % 3, 0.15 * (n % 3)), self.now))
            case "wait":
                self.wait(n / 100.0)
            case "configure":
                self.take(b.configure(b.settings, self.now))
            case _:
                self.fleet(what, name, n)

    def finish(self, request_id: str, outcome: Outcome, usage: Usage | None) -> None:
        b = self.balancer
        if request_id in self.out or request_id in self.held:
            self.out.pop(request_id, None)
            self.held.pop(request_id, None)
            self.lost.discard(request_id)
            self.end(request_id, outcome)
            self.take(b.complete(request_id, outcome, usage, self.now))
        assert b.complete(request_id, outcome, usage, self.now) == []  # told twice, or about nobody

    def fleet(self, what: str, name: str, n: int) -> None:
        gone = {i for i, (_, where) in self.out.items() if where == name}
        event = {
            "eject": Ejected(name), "return": Returned(name), "drain": Draining(name), "undrain": Draining(name, False),
            "remove": Removed(name), "add": Added(name, prefill_rate=9000.0, kv_capacity_tokens=20_000),
            "restart": Restarted(name), "peers": PeerLoad(name, 3, 1000.0 * (n % 5), 0.0, self.now),
            "scrape": Scraped(name, self.now, kv_usage=(n % 10) / 10, num_gpu_blocks=1250, block_size=16),
        }[what]  # fmt: skip
        if what == "add" and name not in self.present:
            self.present.add(name)
            self.ejected.discard(name)
            self.drained.discard(name)
        if name in self.present:
            match what:
                case "remove":
                    self.present.discard(name)
                    self.lost |= gone
                case "eject":
                    self.ejected.add(name)
                case "return":
                    self.ejected.discard(name)
                case "drain":
                    self.drained.add(name)
                case "undrain":
                    self.drained.discard(name)
        self.take(self.balancer.fleet_event(event, self.now))


def shell(arm: str, seed: int = 7) -> Shell:
    parsed = arms.parse(arm)
    name = "forebay" if parsed.policy == "experiment" else parsed.policy
    policy: RoutingPolicy = make(name, None, random.Random(seed))
    if parsed.policy == "experiment":  # a partition of two arms, with a shadow
        plan = Plan("x", Design.PARTITION, ("a", "b"), (1.0, 1.0), seed, 0.0)
        policy = SideBySide({"a": policy, "b": make("cache_aware", None, random.Random(seed))}, "a", plan.groups)
        shadow = make("sticky_table", None, random.Random(seed))
        policy = Shadowing(policy, {"shadow": shadow}, 0.5, {"shadow": Tally()})
    core = Balancer(DEFAULT_CLASSES, policy, parsed.settings, random.Random(seed))
    made = Shell(core)
    for name in NAMES:
        made.fleet("add", name, 0)
    return made


def run(arm: str, steps: list[tuple[str, int]]) -> Shell:
    made = shell(arm)
    for what, n in steps:
        made.step(what, n)
    return made


@COMMON
@given(ARMS, STEPS)
def test_every_request_ends_once_and_the_books_balance(arm: str, steps: list[tuple[str, int]]) -> None:
    made = run(arm, steps)
    for request_id in sorted(made.out):
        made.finish(request_id, Outcome.SUCCESS, None)
    made.wait(4000.0)  # past every deadline there is
    for request_id in sorted(made.out):
        made.finish(request_id, Outcome.SUCCESS, None)
    assert not made.held
    assert len(made.ended) == made.made
    for name in sorted(made.present):
        ledger = made.balancer.fleet.replicas[name].ledger
        assert (ledger.in_flight, ledger.live_decodes, ledger.kv_tokens) == (0, 0, 0.0)
        assert made.balancer.backlog_tokens(name, made.now) == 0.0


@COMMON
@given(ARMS, STEPS)
def test_the_same_events_give_the_same_decisions(arm: str, steps: list[tuple[str, int]]) -> None:
    assert run(arm, steps).log == run(arm, steps).log
