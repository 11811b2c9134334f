"""What a gateway sees of a simulated replica: streams near their objective, gaps, the longest stall, a scrape."""

from __future__ import annotations

import random

import pytest

import policies
from loadtests.gateways import balancers
from loadtests.profiles import PROFILES
from loadtests.scenario import Scenario, engine
from loadtests.simreplica import FEW_TOKENS, NEAR, SimReplica
from loadtests.virtual import Simulation
from loadtests.workloads import CLASSES, WORKLOADS
from policies.arms import parse
from policies.model import Pulse


def test_every_pulse_says_what_a_look_at_each_stream_would(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = SimReplica.pulse
    seen: list[int] = []

    def checked(self: SimReplica, gateway: int, now: float, tick: int) -> Pulse:
        slow = 0
        for flight in self.live[gateway].values():
            job, objective = flight.job, flight.request.tpot_s
            assert job is not None
            assert objective is not None
            tokens = self.engine.outputs(job, tick)
            slow += tokens >= FEW_TOKENS and now - flight.began_at > NEAR * objective * tokens
        pulse = quick(self, gateway, now, tick)
        assert (pulse.live, pulse.near) == (len(self.live[gateway]), slow)
        seen.append(slow)
        return pulse

    monkeypatch.setattr(SimReplica, "pulse", checked)
    plan = WORKLOADS["chat"].cut(1, 1.0, 40.0, 20.0, CLASSES)
    arm = parse("round_robin+pacing")

    def policy(rng: random.Random) -> policies.policy.RoutingPolicy:
        return policies.make(arm.policy, None, rng)

    cores = balancers(policy, plan.classes, arm.settings, 1, 0)
    Simulation(plan, Scenario((engine(PROFILES["a100-8b"], None, 64),) * 2), cores).run()
    assert len(seen) > 500
    assert max(seen) >= 3  # it was busy enough to matter


def test_the_longest_gap_is_that_of_the_steps_since_the_first_token() -> None:
    replica = SimReplica("r0", engine(PROFILES["a100-8b"], None, 64), 1)
    replica._ends, replica._durations = [1.0, 2.0, 3.0], [0.5, 0.3, 0.1]
    assert replica.longest_gap_s(0.9) == 0.5
    assert replica.longest_gap_s(1.0) == 0.3
    assert replica.longest_gap_s(2.5) == 0.1
    assert replica.longest_gap_s(3.0) == 0.0


def test_a_scrape_tells_capacity_and_the_age_of_what_it_read() -> None:
    replica = SimReplica("r7", engine(PROFILES["a100-8b"], None, 64), 1)
    scraped = replica.scrape(5.0, 6.5)
    assert (scraped.replica_id, scraped.at, scraped.running, scraped.kv_usage) == ("r7", 6.5, 0, 0.0)
    assert (scraped.num_gpu_blocks, scraped.block_size) == (26_000, 16)
