"""The virtual run: literal answers for one request, books that balance, equal bytes for equal seeds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import policies
from loadtests.books import check
from loadtests.engine import Engine
from loadtests.gateways import balancers
from loadtests.profiles import PROFILES, Profile
from loadtests.results import ConservationError, summarise
from loadtests.scenario import Incident, Scenario, engine, parse_incident
from loadtests.schedule import Row, Schedule
from loadtests.virtual import Outcomes, Simulation
from loadtests.workloads import CLASSES, WORKLOADS
from policies.arms import parse
from policies.model import ServiceClass
from policies.objectives import Partition

# 10 ms a step and 1 ms a token beyond; nothing else costs
PLAIN = Profile("plain", 0.01, 0.0, 0.001, 0.0, 0.0, num_blocks=1001, max_num_batched_tokens=64, max_num_seqs=64)
ONE = ServiceClass("interactive", ttft_s=1.0, ttft_s_per_token=0.0, tpot_s=0.05)


def rows(*at: float, prompt: int = 64, output: int = 5, same: bool = False) -> tuple[Row, ...]:
    blocks = -(-prompt // 64)
    return tuple(
        Row(i, t, prompt, output, tuple(range((0 if same else i) * 1000, (0 if same else i) * 1000 + blocks)))
        for i, t in enumerate(at)
    )


def schedule(made: tuple[Row, ...], window_s: float = 10.0, drain_s: float = 5.0, c: ServiceClass = ONE) -> Schedule:
    return Schedule(made, window_s, drain_s, 64, {"interactive": c})


def run(plan: Schedule, replicas: int = 1, arm: str = "round_robin", **more: object) -> Outcomes:
    scenario = replace(Scenario((engine(PLAIN, None, 64),) * replicas), **more)  # type: ignore[arg-type]
    chosen = parse(arm)

    def policy(rng: random.Random) -> policies.policy.RoutingPolicy:
        return policies.make(chosen.policy, None, rng)

    cores = balancers(policy, plan.classes, chosen.settings, scenario.gateways, 0)
    return Simulation(plan, scenario, cores, 0).run()


def test_one_request_alone_takes_exactly_its_steps() -> None:
    # prefill of 64 tokens: one step of 64 ms; four more tokens at 10 ms each
    record = run(schedule(rows(1.0))).records[0]
    assert record.first_s == pytest.approx(1.064)
    assert record.end_s == pytest.approx(1.104)
    assert record.tpot_s == pytest.approx(0.010)
    assert record.longest_gap_s == pytest.approx(0.010)
    assert (record.partition, record.completion_tokens, record.cached_tokens) == (Partition.GOOD, 5, 0)


def test_a_prefill_beside_it_stretches_the_gap_of_a_stream() -> None:
    # the second prompt's only chunk shares a step with one decode: 63 + 1 tokens, then the last token and one decode
    records = run(schedule(rows(0.0, 0.07, output=20))).records
    assert records[0].longest_gap_s == pytest.approx(0.064)
    assert records[0].partition is Partition.GOOD


def test_the_second_asker_of_one_prompt_hits_what_the_first_left() -> None:
    records = run(schedule(rows(0.0, 5.0, same=True))).records
    # 64 tokens are 4 blocks of 16; the engine computes at least one token, so three blocks hit
    assert [r.cached_tokens for r in records] == [0, 48]


def test_round_robin_puts_the_same_prompt_on_two_cold_replicas() -> None:
    records = run(schedule(rows(0.0, 5.0, same=True)), replicas=2).records
    assert [r.cached_tokens for r in records] == [0, 0]
    assert [r.replica for r in records] == ["r0", "r1"]


def test_work_still_open_at_the_end_of_the_drain_is_unfinished_and_counts() -> None:
    out = run(schedule(rows(9.9, output=900), drain_s=1.0))
    assert out.records[0].partition is Partition.UNFINISHED
    entry = summarise(schedule(rows(9.9, output=900), drain_s=1.0), out.records, "x")
    assert (entry["offered"], entry["good"], entry["attainment"]) == (1, 0, 0.0)


def test_goodput_divides_by_window_and_drain_whenever_the_last_answer_came() -> None:
    plan = schedule(rows(*(0.5 * i for i in range(15))))
    entry = summarise(plan, run(plan).records, "x")
    assert entry["good"] == 15
    assert entry["goodput_rps"] == 1.0  # 15 / (10 + 5)
    assert entry["attainment"] * entry["offered"] / 15.0 == entry["goodput_rps"]


def test_a_later_turn_comes_its_think_time_after_the_answer() -> None:
    first, second = rows(1.0)[0], replace(rows(1.0, 1.0)[1], at_s=None, session="s", turn=1, think_s=2.0)
    plan = schedule((replace(first, session="s"), second))
    records = run(plan).records
    assert records[1].scheduled_s == pytest.approx(1.104 + 2.0)
    assert records[1].partition is Partition.GOOD


def test_the_next_turn_hits_the_answer_that_it_sends_back() -> None:
    first = Row(0, 0.0, 64, 65, (1,), "s")  # 64 + 65 tokens: two full blocks, the second one is the answer's
    second = Row(1, None, 192, 5, (1, 2, 3), "s", 1, 1.0)
    records = run(schedule((first, second))).records
    assert records[1].cached_tokens == 128


def test_turns_behind_a_failed_turn_fail_too_and_stay_in_the_denominator() -> None:
    long = Row(0, 0.0, 20_000, 5, tuple(range(313)), "s")  # does not fit the context: refused with 400
    later = [Row(i, None, 64, 5, (5000 + i,), "s", i, 1.0) for i in (1, 2)]
    plan = schedule((long, *later))
    records = run(plan).records
    assert [r.partition for r in records] == [Partition.ERROR_HTTP, Partition.NOT_DISPATCHED, Partition.NOT_DISPATCHED]
    assert records[2].reason == "behind a failed turn"
    assert summarise(plan, records, "x")["offered"] == 3


def test_an_impatient_client_leaves_when_its_answer_must_be_late() -> None:
    strict = replace(ONE, ttft_s=0.05, tpot_s=0.05)
    record = run(schedule(rows(0.0), c=strict), patience=True).records[0]
    # 50 ms + 4 x 50 ms after its start; the answer would have ended at 104 ms, so here it does not leave
    assert record.partition is Partition.SLOW_TTFT
    record = run(schedule(rows(0.0, output=60), c=replace(ONE, ttft_s=0.05, tpot_s=0.001)), patience=True).records[0]
    assert record.partition is Partition.ABANDONED
    assert record.end_s == pytest.approx(0.05 + 59 * 0.001)
    assert record.wasted_tokens > 0


def test_a_lost_replica_truncates_what_streamed_and_what_waited_goes_elsewhere() -> None:
    plan = schedule(rows(0.0, 0.01, 0.02, output=100))
    records = run(plan, replicas=2, incidents=(Incident("lost", 0.1, 0),)).records
    assert records[0].partition is Partition.TRUNCATED  # had its first token at 64 ms
    assert (records[2].partition, records[2].replica, records[2].attempts) == (Partition.GOOD, "r1", 2)


def test_a_restarted_replica_comes_back_with_an_empty_cache() -> None:
    plan = schedule(rows(0.0, 3.0, 8.0, same=True))
    records = run(plan, incidents=(Incident("restarted", 4.0, 0, down_s=2.0),)).records
    assert [r.cached_tokens for r in records] == [0, 48, 0]


def test_a_slow_replica_takes_its_factor_longer() -> None:
    record = run(schedule(rows(1.0)), incidents=(Incident("slow", 0.5, 0, factor=3.0),)).records[0]
    assert record.ttft_s == pytest.approx(3 * 0.064)


def test_an_added_replica_gets_work() -> None:
    records = run(schedule(rows(1.0, 5.0, 6.0)), incidents=(Incident("added", 3.0, 1),)).records
    assert {r.replica for r in records} == {"r0", "r1"}


@pytest.mark.parametrize("arm", ["round_robin", "least_request"])
@pytest.mark.parametrize("gateways", [1, 3])
def test_equal_seeds_give_equal_results_to_the_last_bit(arm: str, gateways: int) -> None:
    plan = WORKLOADS["chat"].cut(3, 0.5, 20.0, 10.0, CLASSES)

    def once() -> list[dict[str, object]]:
        return [r.to_json() for r in run(plan, replicas=2, arm=arm, gateways=gateways, peers=True).records]

    assert once() == once()


def test_books_that_do_not_balance_are_an_error() -> None:
    plan = schedule(rows(0.0))
    chosen = parse("round_robin")
    cores = balancers(lambda rng: policies.make("round_robin", None, rng), plan.classes, chosen.settings, 1, 0)
    simulation = Simulation(plan, Scenario((engine(PLAIN, None, 64),)), cores, 0)
    simulation.run()
    simulation.replicas["r0"].engine.counters.generation_tokens += 1
    with pytest.raises(ConservationError, match="r0: 6 tokens generated, attempts got 5"):
        check(simulation.flights, cores, simulation.replicas, 0)


def test_incidents_are_read_from_the_command_line() -> None:
    assert parse_incident("slow:3@60x4") == Incident("slow", 60.0, 3, factor=4.0)
    assert parse_incident("restarted:1@60+5") == Incident("restarted", 60.0, 1, down_s=5.0)
    with pytest.raises(ValueError, match="lost:0@120"):
        parse_incident("gone:1@2")


def test_a_budget_below_the_sequences_of_a_profile_lowers_those_too() -> None:
    """vLLM does not start with more sequences than tokens in a step, so whoever sets 512 has to set both."""
    small = engine(PROFILES["h100-70b"], 512, 64)
    assert (Engine(small).budget, Engine(small).max_seqs) == (512, 512)
    assert Engine(engine(PROFILES["h100-70b"], 8192, 64)).max_seqs == 1024
