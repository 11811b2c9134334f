"""The benchmark of a standing queue measures what it says: a queue that stands, and requests that leave it."""

from __future__ import annotations

from loadtests.bench.held import REPLICAS, Standing


def test_the_queue_stands_while_requests_are_admitted_from_it() -> None:
    standing = Standing(60)
    admitted = [standing.round() for _ in range(40)][-1]
    assert len(admitted) > 0
    assert all(spent >= 0.0 for spent in admitted)
    assert 60 - 2 * REPLICAS < standing.balancer.binding.queue.count <= 60
