"""Workers in virtual time: messages take time, orders that cross are kept apart, and the books balance."""

from __future__ import annotations

import random
from dataclasses import replace

import policies
from loadtests.campaign import simulate_arm
from loadtests.gateways import balancers
from loadtests.hands import Handed
from loadtests.profiles import Profile
from loadtests.scenario import Incident, Scenario, engine
from loadtests.schedule import Row, Schedule
from loadtests.virtual import Outcomes
from loadtests.workloads import CLASSES, WORKLOADS
from policies.arms import parse
from policies.model import ServiceClass
from policies.objectives import Partition
from policies.settings import Settings

# 10 ms a step and 1 ms a token beyond; nothing else costs
PLAIN = Profile("plain", 0.01, 0.0, 0.001, 0.0, 0.0, num_blocks=1001, max_num_batched_tokens=64, max_num_seqs=64)
ONE = ServiceClass("interactive", ttft_s=1.0, ttft_s_per_token=0.0, tpot_s=0.05)
FILL = ServiceClass("batch", ttft_s=None, tpot_s=None, e2e_s=60.0, fill_only=True)


def row(i: int, at_s: float, prompt: int = 64, output: int = 5, service_class: str = "interactive") -> Row:
    blocks = tuple(range(i * 1000, i * 1000 + -(-prompt // 64)))
    return Row(i, at_s, prompt, output, blocks, service_class=service_class)


def run(rows: list[Row], delay_s: float, arm: str = "round_robin", **more: object) -> Outcomes:
    """Two hands; every message takes between half of `delay_s` and twice that."""
    plan = Schedule(tuple(rows), 10.0, 50.0, 64, {"interactive": ONE, "batch": FILL})
    scenario = Scenario((engine(PLAIN, None, 64),), hands=2, hand_delay_s=(delay_s, delay_s))
    scenario = replace(scenario, **more)  # type: ignore[arg-type]
    chosen = parse(arm)

    def policy(rng: random.Random) -> policies.policy.RoutingPolicy:
        return policies.make(chosen.policy, None, rng)

    return Handed(plan, scenario, balancers(policy, plan.classes, chosen.settings, 1, 0), 0).run()


def test_a_request_comes_later_by_two_messages_and_ends_as_it_would() -> None:
    near, far = run([row(0, 1.0)], 0.0).records[0], run([row(0, 1.0)], 0.1).records[0]
    assert near.first_s is not None
    assert far.first_s is not None
    assert abs(near.first_s - 1.064) < 1e-9
    assert 0.1 <= far.first_s - near.first_s <= 0.4
    assert far.end_s is not None
    assert abs(far.end_s - far.first_s - 0.04) < 1e-9, "what streams does not pass by the core"
    assert (far.partition, far.completion_tokens) == (Partition.GOOD, 5)


def test_a_deadline_counts_from_when_the_hand_received_it() -> None:
    (late,) = run([row(0, 1.0)], 0.8, arm="least_work+admission").records
    assert late.partition in (Partition.REJECTED, Partition.SLOW_TTFT)


def test_batch_that_has_begun_to_answer_when_it_is_taken_back_stays() -> None:
    rows = [row(i, 0.2 * i, prompt=640, output=200, service_class="batch") for i in range(8)]
    rows += [row(100 + i, 0.1 + 0.1 * i, prompt=320, output=30) for i in range(60)]
    out = run(sorted(rows, key=lambda r: r.at_s or 0.0), 0.2, arm="forebay")
    assert sum(r.wasted_tokens for r in out.records) == 0, "nothing that had begun was thrown away"
    assert {r.partition for r in out.records if r.service_class == "batch"} == {Partition.GOOD}


def test_a_replica_that_is_lost_under_way_loses_only_what_had_begun() -> None:
    rows = [row(i, 0.05 * i, output=40) for i in range(60)]
    two = (engine(PLAIN, None, 64),) * 2
    out = run(rows, 0.02, arm="least_request", engines=two, incidents=(Incident("lost", 1.5, 0),))
    lost = [r for r in out.records if r.partition is Partition.TRUNCATED]
    assert {r.replica for r in lost} == {"r0"}
    assert all(r.complete for r in out.records if r not in lost)


def test_the_books_of_several_workers_balance_and_equal_seeds_give_equal_records() -> None:
    source = WORKLOADS["chat"]
    plan = source.cut(0, 3.0, 8.0, 20.0, CLASSES)
    scenario = Scenario(
        (engine(Profile("small", 0.01, 0.0, 1e-4, 0.0, 0.0, num_blocks=4001), None, plan.block_tokens),) * 4, hands=4
    )
    arm = parse("forebay", Settings())
    once, again = (simulate_arm(plan, scenario, arm, {}) for _ in range(2))
    assert once.records == again.records
    assert sum(r.partition is Partition.GOOD for r in once.records) > 0
