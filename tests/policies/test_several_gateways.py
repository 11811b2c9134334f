"""What a core does with what others know: requests that run already, load and service elsewhere, its own part."""

from __future__ import annotations

import random

from policies import registry
from policies.core import Balancer
from policies.model import Added, Dispatch, Hold, Outcome, PeerLoad, Pulse, Request, Scraped, ServiceClass, Usage
from policies.prefix import asked, boundaries, told
from policies.settings import Settings

CLASSES = [ServiceClass("standard"), ServiceClass("other")]


def core(policy: str = "forebay", **settings: object) -> Balancer:
    made = Balancer(CLASSES, registry.make(policy), settings, random.Random(0))
    for replica in ("r0", "r1"):
        made.fleet_event(Added(replica, kv_capacity_tokens=1_000_000), 0.0)
    return made


def request(name: str, tokens: int = 1000, **more: object) -> Request:
    made = Request(name, prompt_tokens=tokens, prompt_bytes=4 * tokens)
    for key, value in more.items():
        setattr(made, key, value)
    return made


def backlog(made: Balancer, now: float) -> list[float]:
    return [made.backlog_tokens(r, now) for r in ("r0", "r1")]


def test_a_request_that_runs_already_is_charged_where_it_runs() -> None:
    made = core()
    assert made.adopt(request("a"), "r1", since=9.0, started=False, now=10.0) == []
    assert backlog(made, 10.0) == [0.0, 1000.0]
    assert made.loads(10.0)["r1"][:2] == (1, 1000.0)
    made.complete("a", Outcome.SUCCESS, Usage(1000, 5, 0), 11.0)
    assert backlog(made, 11.0) == [0.0, 0.0]
    assert made.loads(11.0) == {}


def test_one_that_has_begun_to_answer_waits_for_no_prefill_and_proves_nothing_about_others() -> None:
    made = core()
    made.adopt(request("waits"), "r0", since=9.0, started=False, now=10.0)
    made.adopt(request("streams"), "r0", since=5.0, started=True, now=10.0)
    assert backlog(made, 10.0) == [1000.0, 0.0]
    assert made.fleet.replicas["r0"].ledger.live_decodes == 1
    for name in ("streams", "waits"):
        made.complete(name, Outcome.CANCELLED, None, 11.0)
    assert made.fleet.replicas["r0"].ledger.live_decodes == 0
    assert backlog(made, 11.0) == [0.0, 0.0]


def test_where_the_replica_is_not_known_nothing_is_open() -> None:
    made = core()
    assert made.adopt(request("a"), "gone", since=0.0, started=True, now=1.0) == []
    assert not made.is_open("a")


def test_a_replica_that_others_load_is_left_alone_while_they_say_so() -> None:
    made = core()
    made.fleet_event(PeerLoad("r0", in_flight=20, prefill_backlog_tokens=100_000.0, at=10.0), 10.0)
    (sent,) = made.submit(request("a"), 10.0)
    assert isinstance(sent, Dispatch)
    assert sent.replica_id == "r1"
    made.fleet_event(PeerLoad("r1", in_flight=20, prefill_backlog_tokens=100_000.0, at=10.0), 10.0)
    (held,) = made.submit(request("b"), 10.0)
    assert isinstance(held, Hold), "both engines have more than enough to do"
    (freed,) = made.fleet_event(PeerLoad("r0", at=10.1), 10.1)
    assert isinstance(freed, Dispatch)
    assert (freed.request_id, freed.replica_id) == ("b", "r0")


def test_where_others_hold_requests_for_a_replica_they_are_ahead_of_ours_while_that_is_fresh() -> None:
    for busy, idle in (("r0", "r1"), ("r1", "r0")):
        made = core()
        made.fleet_event(PeerLoad(busy, at=10.0, parked_s=3.0), 10.0)
        (sent,) = made.submit(request("a"), 10.0)
        assert isinstance(sent, Dispatch)
        assert sent.replica_id == idle
        seen = {a.replica_id: a.predicted_ttft_s for a in made.considered(request("b"), 10.0)}
        assert seen[busy] > seen[idle] + 2.5
        made.fleet_event(PeerLoad(busy, at=10.1), 10.1)
        assert {a.replica_id: a.predicted_ttft_s for a in made.considered(request("b"), 10.1)}[busy] < 0.5


def test_what_is_held_for_a_replica_is_told_even_where_nothing_was_sent_there() -> None:
    made = core()
    for replica in ("r0", "r1"):
        made.fleet_event(PeerLoad(replica, in_flight=20, prefill_backlog_tokens=100_000.0, at=10.0), 10.0)
    (held,) = made.submit(request("a", 8000), 10.0)
    assert isinstance(held, Hold)
    told_of = made.loads(10.0)
    assert [row[7] for row in told_of.values()] == [1.0]
    assert [row[:2] for row in told_of.values()] == [(0, 0.0)]
    made.cancel("a", 10.1)
    assert made.loads(10.1) == {}


def scraped(replica: str, at: float, fill: float) -> Scraped:
    return Scraped(replica, at, num_gpu_blocks=62_501, block_size=16, prefix_queries=fill, prefix_hits=0.0)


def test_what_others_will_have_driven_out_of_a_cache_is_not_believed_to_be_there() -> None:
    for peers in (True, False):
        made = core()
        chain = tuple(range(1, 16))
        (sent,) = made.submit(request("a", chain=chain), 0.0)
        assert isinstance(sent, Dispatch)
        made.complete("a", Outcome.SUCCESS, Usage(1000, 5, 0), 1.0)
        for second in range(1, 32):  # 50,000 tokens a second into a cache of a million
            if peers:
                made.fleet_event(PeerLoad(sent.replica_id, at=float(second)), float(second))
            made.fleet_event(scraped(sent.replica_id, float(second), 50_000.0 * second), float(second))
            if second == 15:
                assert made.dispatcher.affinity.look(request("b", chain=chain), 15.0).claimed_tokens.count(0.0) == 1
        left = made.dispatcher.affinity.look(request("b", chain=chain), 31.0).claimed_tokens.count(0.0)
        assert left == (2 if peers else 1), "alone it knows all that comes and counts by size"


def test_streams_of_others_close_the_pace_as_ours_do() -> None:
    made = core()
    replica = made.fleet.replicas["r0"]
    made.fleet_event(PeerLoad("r0", in_flight=10, at=1.0, live=10, near=5, least_slack_s=0.001), 1.0)
    assert replica.pace.closed
    assert replica.streams(1.0)
    assert replica.everyones(Pulse(live=10, near=0, least_slack_s=0.05), 1.0) == Pulse(20, 5, 0.001)
    assert not replica.streams(3.5), "what was said two seconds ago counts no more"


def test_what_others_send_to_a_replica_in_trouble_is_debt_for_all() -> None:
    """Each with a bucket of its own, every gateway would send a prefill to streams that need to recover."""
    made = core()
    replica = made.fleet.replicas["r0"]
    made.fleet_event(PeerLoad("r0", in_flight=10, at=1.0, live=10, near=5, least_slack_s=0.001, spent_s=0.9), 1.0)
    assert replica.pace.closed
    assert replica.pace.wait(1.0) > 0.0
    again = made.fleet_event(PeerLoad("r0", in_flight=10, at=5.0, live=10, near=5, least_slack_s=0.001), 5.0)
    assert again == []
    assert replica.pace.wait(5.0) > 0.0, "0.9 s are owed for nine seconds at the trickle of a tenth"
    made.fleet_event(PeerLoad("r0", in_flight=10, at=10.5, live=10, near=5, least_slack_s=0.001), 10.5)
    assert replica.pace.wait(10.5) == 0.0


def test_gaps_beside_a_prefill_of_others_are_gaps_beside_a_prefill() -> None:
    made = core()
    assert not made.prefilling("r0")
    made.fleet_event(PeerLoad("r0", in_flight=1, prefill_backlog_tokens=4000.0, at=1.0), 1.0)
    assert made.prefilling("r0")
    made.wake(2.0)
    assert not made.prefilling("r0"), "4,000 tokens have been prefilled by now"


def test_two_gateways_count_on_one_engine_once() -> None:
    """Another has 0.2 s of prefill there, we send a second's: after half a second 0.7 s are left, not 0.5."""
    made = core()
    made.fleet_event(PeerLoad("r0", in_flight=1, prefill_backlog_tokens=1600.0, at=0.0), 0.0)
    made.submit(request("ours", 8000, pinned="r0"), 0.0)
    assert round(made.fleet.replicas["r0"].ahead_s(0.5), 3) == 0.7


def test_a_long_prefill_teaches_though_others_sent_more_behind_it_and_not_if_they_were_before_it() -> None:
    made = core()
    fit = made.fleet.replicas["r0"].prefill
    made.submit(request("alone", 8000, pinned="r0"), 0.0)
    made.fleet_event(PeerLoad("r0", in_flight=1, prefill_backlog_tokens=4000.0, at=1.0, spent_s=0.5), 1.0)
    made.first_token("alone", 2.0)
    assert fit.samples == 1
    made.fleet_event(PeerLoad("r0", in_flight=1, prefill_backlog_tokens=800.0, at=1.99), 1.99)
    (sent,) = made.submit(request("behind", 8000, pinned="r0"), 2.0)
    assert isinstance(sent, Dispatch)
    made.first_token("behind", 5.0)
    made.fleet_event(PeerLoad("r0", at=6.0), 6.0)
    made.submit(request("at once", 8000, pinned="r0"), 10.0)
    made.fleet_event(PeerLoad("r0", in_flight=1, prefill_backlog_tokens=800.0, at=10.1, spent_s=0.1), 10.1)
    made.first_token("at once", 12.0)
    assert fit.samples == 1, "theirs may have been there first"


def test_prefill_sent_is_told_as_a_sum_since_the_start() -> None:
    made = core()
    for i in range(3):
        made.submit(request(f"q{i}", 1000), float(i))
        made.first_token(f"q{i}", i + 0.5)
    told_s = sum(row[6] for row in made.loads(3.0).values())
    assert abs(told_s - sum(r.pace.spent_s for r in made.fleet.replicas.values())) < 1e-3
    assert told_s > 0.2


def test_service_elsewhere_counts_between_the_classes() -> None:
    made = core()
    made.served_elsewhere("", "other", 5.0, 1.0)
    made.served_elsewhere("", "nobody's", 5.0, 1.0)
    assert made.served() == {}, "it is not ours to tell"
    lanes = {key[1]: lane.service_s for key, lane in made.binding.queue._lanes.items()}
    assert lanes == {"other": 5.0}


def test_a_gateway_counts_on_its_part_of_the_fleet() -> None:
    made = core()
    for i in range(10):
        made.submit(request(f"q{i}", 8000, ttft_deadline=i + 10.0), float(i))  # without, it asks for nothing in time
    own = made.demand(10.0)
    assert own > 0.0
    made.shared_with(3.0 * own, 10.0)
    assert abs(made.binding.part - 0.25) < 1e-9
    made.shared_with(0.0, 10.0)
    assert made.binding.part == 1.0


def test_loads_of_two_gateways_add_up() -> None:
    a = PeerLoad("r0", 1, 10.0, 100.0, 5.0, 2, 1, None)
    b = PeerLoad("r0", 2, 20.0, 200.0, 4.0, 3, 0, 0.02)
    assert a.plus(b) == PeerLoad("r0", 3, 30.0, 300.0, 4.0, 5, 1, 0.02)


def test_boundaries_lose_at_most_a_fifth_of_a_match() -> None:
    assert boundaries(0) == []
    assert boundaries(3) == [1, 2, 3]
    assert boundaries(30) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28]
    for length in range(1, 513):
        assert boundaries(length)[-1] >= 0.8 * length
    assert len(boundaries(512)) == 32
    assert Settings().pacing


def test_the_end_of_a_prompt_is_told_and_asked_for_among_the_last_chunks() -> None:
    assert told(0) == asked(0) == ()
    assert told(3) == asked(3) == (1, 2, 3)
    assert told(30)[-3:] == (24, 28, 30)
    assert told(63)[-3:] == (48, 56, 63)
    assert asked(60)[-34:] == (24, 28, *range(29, 61))
    for turn in range(1, 500):
        for longer in range(turn, min(512, turn + 31)):
            assert turn in asked(longer), "a next turn finds the end of the one before"


def test_after_a_long_answer_or_question_the_end_of_the_turn_before_is_missed_by_seven_chunks_at_most() -> None:
    assert set(asked(200)) - set(asked(200)[-32:]) >= {72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152, 160, 168}
    for turn in range(1, 500):
        for longer in range(turn, min(512, turn + 128)):
            known = set(told(turn)) & set(asked(longer))
            assert max(known, default=0) >= turn - 7
