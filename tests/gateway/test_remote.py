"""What a hand does with open requests when the core that decided about them goes."""

from __future__ import annotations

from gateway.messages import To
from gateway.mirror import Mirror
from gateway.remote import RemoteScheduler
from policies.model import Dispatch, Outcome, Request, Shed
from tests.gateway.running import until
from tests.gateway.test_news import Owner, linked


def hand() -> RemoteScheduler:
    """In front of one replica, with a core."""
    fleet = Mirror(lambda id, sign: None)
    fleet.show([[["r0", "http://127.0.0.1:1", None, None, [["tiny", None, None, {}]], True, [], True]], {}, []])
    made = RemoteScheduler(fleet, 60.0, lambda: None)
    made.connected(linked()[0])
    return made


async def test_a_request_that_was_taken_back_may_go_where_it_was_to_go_first() -> None:
    """It never failed there: told that there is no replica, its client would wonder which one it sees."""
    scheduler, owner = hand(), Owner()
    scheduler.submit(Request("a", received_at=1.0, model="tiny"), owner)
    scheduler.heard([To.DISPATCH, "a", "r0", "turn", None])
    scheduler.heard([To.ABORT, "a", "taken_back", True])
    scheduler.alone()
    await until(lambda: len(owner.decisions) == 3)
    scheduler.stop()
    decided = owner.decisions[-1]
    assert isinstance(decided, Dispatch)
    assert (decided.replica_id, decided.reason) == ("r0", "fallback")


async def test_a_request_that_failed_on_the_only_replica_is_refused() -> None:
    scheduler, owner = hand(), Owner()
    scheduler.submit(Request("a", received_at=1.0, model="tiny"), owner)
    scheduler.heard([To.DISPATCH, "a", "r0", "turn", None])
    scheduler.alone()
    scheduler.failed("a", Outcome.ERROR)
    scheduler.stop()
    assert owner.decisions[-1] == Shed("a", "no_replica", 1.0)
