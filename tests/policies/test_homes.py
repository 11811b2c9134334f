"""Cold prefixes go where every gateway would send them, below what everybody shares; hot ones get more homes."""

from __future__ import annotations

from policies.homes import Homes
from policies.prefix import chain

SYSTEM = b"shared by everybody " * 52  # 1040 bytes: four chunks


def homes(n: int = 8) -> Homes:
    made = Homes()
    for i in range(n):
        made.ring.add(f"r{i}")
    return made


def conversation(i: int) -> tuple[int, ...]:
    return chain([SYSTEM, f"conversation {i:05} ".encode() * 400])


def test_the_key_moves_below_a_system_prompt_that_everybody_shares() -> None:
    it = homes()
    assert it.key(conversation(0)) == conversation(0)[0]  # nothing known yet: the first chunk
    for i in range(200):
        it.seen(conversation(i), float(i))
    keys = {it.key(conversation(i)) for i in range(100)}
    assert keys == {conversation(i)[15] for i in range(100)}  # depth 16: what separates conversations


def test_a_prefix_below_its_share_of_a_replica_keeps_the_shallow_key() -> None:
    it = homes()
    for i in range(800):
        it.seen(chain([f"tenant {i % 16:03} ".encode() * 100, str(i).encode() * 2000]), 1.0)
    one, two = (chain([b"tenant 003 " * 100, more * 2000]) for more in (b"a", b"b"))
    assert it.key(one) == it.key(two) == one[0]


def test_without_a_chain_the_session_is_the_key_and_without_either_there_is_none() -> None:
    it = homes()
    assert it.place((), "session-1", 0.0).order == it.place((), "session-1", 9.0).order
    assert it.place((), None, 0.0).key is None
    assert it.place((), None, 0.0).order == ()


def test_two_gateways_that_see_different_requests_of_the_same_traffic_agree() -> None:
    one, two = homes(), homes()
    for i in range(400):
        (one if i % 2 else two).seen(conversation(i), i / 10)
    assert [one.place(conversation(i), None, 41.0) for i in range(50)] == [
        two.place(conversation(i), None, 41.0) for i in range(50)
    ]


def test_spills_add_homes_at_most_one_per_two_seconds_and_a_quiet_minute_takes_one_back() -> None:
    it, key = homes(), 17
    for t in (0.0, 0.5, 1.0, 1.9):
        it.spilled(key, t)
    assert it.homes(key, 2.0) == 2
    it.spilled(key, 2.0)
    it.spilled(key, 4.5)
    assert it.homes(key, 5.0) == 4
    assert it.homes(key, 64.0) == 4
    assert it.homes(key, 64.6) == 3
    assert it.homes(key, 500.0) == 1


def test_homes_cover_the_work_of_the_key_and_never_exceed_the_fleet() -> None:
    it = homes(4)
    for t in range(120):
        it.used(5, 1.2, float(t))  # 1.2 seconds of prefill per second: two homes at 60 % each
    assert it.homes(5, 120.0) == 2
    for t in range(120, 240):
        it.used(5, 9.0, float(t))
    assert it.homes(5, 240.0) == 4
    assert it.homes(5, 600.0) == 1
