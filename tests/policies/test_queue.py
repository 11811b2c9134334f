"""Who goes first among those that wait."""

from __future__ import annotations

import random

from policies.model import Request, ServiceClass
from policies.queue import HeldQueue
from policies.tracked import Tracked

CHAT, DOCS = ServiceClass("chat"), ServiceClass("docs", weight=3.0)
BATCH = ServiceClass("batch", weight=0.1, floor_share=0.05, fill_only=True)


def waiting(queue: HeldQueue, name: str, due: float, tenant: str | None = None, cls: ServiceClass = CHAT) -> Tracked:
    tracked = Tracked(Request(name, tenant=tenant, prompt_bytes=10), cls)
    queue.add(tracked, due)
    return tracked


def order(queue: HeldQueue, now: float = 0.0) -> list[str]:
    return [t.request.id for t in queue.in_order(now)]


def serve(queue: HeldQueue, count: int, seconds: float = 1.0, now: float = 0.0) -> list[str]:
    served = []
    for _ in range(count):
        tracked = next(queue.in_order(now))
        queue.remove(tracked)
        queue.charge(tracked, seconds, now)
        served.append(tracked.request.id)
    return served


def test_earliest_deadline_first_and_first_come_among_equals() -> None:
    queue = HeldQueue()
    for name, due in (("late", 9.0), ("soon", 1.0), ("also soon", 1.0)):
        waiting(queue, name, due)
    assert order(queue) == ["soon", "also soon", "late"]
    assert (len(queue), queue.bytes) == (3, 30)


def test_a_tenant_that_floods_does_not_delay_the_other() -> None:
    queue = HeldQueue()
    for n in range(20):
        waiting(queue, f"flood{n}", float(n), "flood")
    for n in range(3):
        waiting(queue, f"small{n}", 100.0 + n, "small")
    assert serve(queue, 6) == ["flood0", "small0", "flood1", "small1", "flood2", "small2"]


def test_a_tenant_saves_nothing_up_by_idling() -> None:
    queue = HeldQueue()
    for n in range(20):
        waiting(queue, f"a{n}", float(n), "a")
    serve(queue, 10)
    for n in range(10):
        waiting(queue, f"b{n}", float(n), "b")
    assert sum(name[0] == "b" for name in serve(queue, 6)) == 3


def test_classes_share_by_weight() -> None:
    queue = HeldQueue()
    for n in range(40):
        waiting(queue, f"chat{n}", float(n), cls=CHAT)
        waiting(queue, f"docs{n}", float(n), cls=DOCS)
    served = serve(queue, 40)
    assert 28 <= sum(name.startswith("docs") for name in served) <= 32


def test_batch_goes_last_unless_it_is_below_its_floor() -> None:
    queue = HeldQueue()
    queue.charge(waiting(queue, "b", 0.0, cls=BATCH), 10.0, 0.0)
    for n in range(60):
        waiting(queue, f"chat{n}", 5.0, cls=CHAT)
    waiting(queue, "b2", 0.0, cls=BATCH)
    served = serve(queue, 60, seconds=10.0, now=40.0)
    assert served[0] == "chat0"  # batch has just had all of the service there was
    assert "b" in served  # and in the end its floor


def test_what_is_removed_is_gone_and_the_rest_keeps_its_order() -> None:
    rng, queue = random.Random(4), HeldQueue()
    held = {f"r{n}": waiting(queue, f"r{n}", rng.choice([1.0, 2.0, 3.0]), rng.choice("ab")) for n in range(200)}
    for name in rng.sample(sorted(held), 150):
        queue.remove(held.pop(name))
        queue.remove(Tracked(Request(name), CHAT))  # not held: nothing happens
    assert sorted(t.request.id for t in queue.everything()) == sorted(held)
    assert (len(queue), queue.bytes, queue.held_by_class()) == (50, 500, {"chat": 50})
    for flow in {t.flow for t in held.values()}:
        assert flow is not None
        assert [e[:2] for e in flow.entries] == sorted(e[:2] for e in flow.entries)


def test_tenants_of_a_class_share_by_their_weight() -> None:
    queue = HeldQueue()
    for n in range(40):
        for tenant, weight in (("gold", 3.0), ("tin", 1.0)):
            queue.add(Tracked(Request(f"{tenant}{n}", tenant=tenant, tenant_weight=weight), CHAT), float(n))
    assert serve(queue, 8) == ["gold0", "tin0", "gold1", "gold2", "gold3", "tin1", "gold4", "gold5"]
