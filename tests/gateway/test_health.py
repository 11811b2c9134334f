"""How replicas leave and re-enter the rotation, as stories; and what may never happen, as properties."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.health import FleetHealth, Phase
from gateway.sections import Health
from gateway.signals import HARD, SOFT, Sign
from policies.model import Ejected, FleetEvent, Returned, Scraped


def fleet(*replicas: str, **values: object) -> FleetHealth:
    """A fleet whose replicas all answered their first probe at time 0."""
    health = FleetHealth(Health.model_validate(values))
    for replica in replicas:
        health.add(replica, 0.0)
        health.probed(replica, None, 0.0)
    return health


def fail(health: FleetHealth, replica: str, now: float, sign: Sign = Sign.RESET, times: int = 3) -> list[FleetEvent]:
    return [event for _ in range(times) for event in health.sign(replica, sign, now)]


def test_a_port_shut_for_ten_seconds_has_lost_what_it_was_asked() -> None:
    health = fleet("a", "b")
    health.probed("a", Sign.REFUSED, 10.0)
    health.probed("a", Sign.REFUSED, 19.9)
    assert health.shut(19.9) == []
    assert health.shut(20.0) == ["a"]
    health.probed("a", None, 21.0)
    assert health.shut(40.0) == []


def test_a_port_shut_to_newcomers_whose_metrics_still_come_has_lost_nothing() -> None:
    health = fleet("a")
    health.probed("a", Sign.REFUSED, 10.0)
    scrape(health, 15.0, 5.0, 1)
    assert health.shut(20.0) == []
    health.probed("a", Sign.REFUSED, 21.0)
    assert health.shut(30.0) == []
    assert health.shut(31.0) == ["a"]


# -- into rotation ---------------------------------------------------------------------------------------------------


def test_a_new_replica_waits_for_its_first_good_probe() -> None:
    health = FleetHealth(Health())
    health.add("a", 0.0)
    assert not health.available("a")
    assert health.announced("a") == [Ejected("a", "starting")]
    assert health.probed("a", Sign.REFUSED, 1.0) == []
    assert health.records["a"].reason == "refused"
    assert health.probed("a", None, 2.0) == [Returned("a")]
    assert health.available("a")
    assert health.announced("a") == []


# -- hard signs ------------------------------------------------------------------------------------------------------


def test_one_refused_connect_ejects_and_a_good_probe_after_the_back_off_returns_half_open() -> None:
    health = fleet("a", "b")
    assert health.sign("a", Sign.REFUSED, 10.0) == [Ejected("a", "refused", statistical=False)]
    assert not health.available("a")
    assert health.probed("a", None, 11.0) == []  # back-off is 2 s
    assert health.probed("a", None, 12.0) == [Returned("a", half_open=True)]
    assert health.available("a")


def test_the_first_abort_nobody_asked_for_ejects_and_only_a_token_brings_it_back() -> None:
    health = fleet("a")
    assert health.sign("a", Sign.ABORT, 10.0) == [Ejected("a", "abort", statistical=False)]
    assert health.probed("a", None, 20.0) == []  # a draining replica answers /health with 200
    assert not health.wants_canary("a", 11.9)
    assert health.wants_canary("a", 12.0)
    assert health.canaried("a", Sign.ABORT, 12.0) == []
    assert not health.wants_canary("a", 15.9)  # 4 s more
    assert health.wants_canary("a", 16.0)
    assert health.canaried("a", None, 16.0) == [Returned("a", half_open=True)]


def test_a_restarted_process_needs_no_token() -> None:
    health = fleet("a")
    health.scraped(Scraped("a", 0.0, iterations=100.0, started_at=1000.0), 0, 0.0)
    health.sign("a", Sign.ABORT, 10.0)
    _, restarted = health.scraped(Scraped("a", 12.0, iterations=0.0, started_at=2000.0), 0, 12.0)
    assert restarted
    assert health.probed("a", None, 13.0) == [Returned("a", half_open=True)]


def test_a_counter_that_falls_is_a_restart_where_the_start_time_is_not_told() -> None:
    health = fleet("a")
    assert health.scraped(Scraped("a", 0.0, generation_tokens=500.0), 0, 0.0) == ([], False)
    assert health.scraped(Scraped("a", 1.0, generation_tokens=501.0), 0, 1.0) == ([], False)
    assert health.scraped(Scraped("a", 2.0, generation_tokens=3.0), 0, 2.0) == ([], True)


def test_a_probe_needs_two_failures_unless_the_port_refuses() -> None:
    health = fleet("a", "b")
    assert health.probed("a", Sign.PROBE_FAILED, 1.0) == []
    assert health.probed("a", Sign.PROBE_FAILED, 2.0) == [Ejected("a", "probe_failed")]
    assert health.probed("b", Sign.REFUSED, 2.0) == [Ejected("b", "refused")]


# -- a hung engine ---------------------------------------------------------------------------------------------------


def scrape(health: FleetHealth, now: float, iterations: float | None, in_flight: int) -> list[FleetEvent]:
    return health.scraped(Scraped("a", now, iterations=iterations, generation_tokens=7.0), in_flight, now)[0]


def test_what_the_gateway_itself_is_short_of_changes_nothing() -> None:
    health = fleet("a")
    assert [health.probed("a", Sign.OURS, n) for n in range(5)] == [[]] * 5
    assert fail(health, "a", 6.0, Sign.OURS, times=50) == []
    assert health.available("a")
    out = health.sign("a", Sign.ABORT, 7.0)
    assert out == [Ejected("a", "abort")]
    until = health.records["a"].until
    assert health.canaried("a", Sign.OURS, until) == []
    assert (health.records["a"].until, health.wants_canary("a", until)) == (until, True)


def test_requests_in_flight_and_no_engine_step_for_ten_seconds_is_hung() -> None:
    health = fleet("a")
    assert scrape(health, 0.0, 50.0, 4) == []
    for now in range(1, 11):
        assert scrape(health, float(now), 50.0, 4) == []
    assert scrape(health, 11.0, 50.0, 4) == [Ejected("a", "hung", statistical=False)]


def test_an_idle_engine_makes_no_steps_and_is_not_hung() -> None:
    health = fleet("a")
    for now in range(100):
        assert scrape(health, float(now), 50.0, 0) == []


def test_one_step_or_an_idle_moment_starts_the_count_again() -> None:
    health = fleet("a")
    for now in range(10):
        scrape(health, float(now), 50.0, 4)
    assert scrape(health, 10.0, 51.0, 4) == []
    for now in range(11, 21):
        assert scrape(health, float(now), 51.0, 4) == []
    assert scrape(health, 21.0, 51.0, 0) == []
    for now in range(22, 32):
        assert scrape(health, float(now), 51.0, 4) == []


def test_three_scrapes_are_needed_even_when_they_are_slow() -> None:
    health = fleet("a")
    assert [len(scrape(health, now, 50.0, 1)) for now in (0.0, 30.0, 60.0, 90.0)] == [0, 0, 0, 1]


def test_a_replica_that_tells_no_heartbeat_is_not_judged_by_it() -> None:
    health = fleet("a")
    for now in range(60):
        assert health.scraped(Scraped("a", float(now), running=3.0), 3, float(now)) == ([], False)


def test_sleep_takes_a_replica_out_and_waking_brings_it_back_without_back_off() -> None:
    health = fleet("a")
    assert health.scraped(Scraped("a", 1.0, awake=False), 0, 1.0)[0] == [Ejected("a", "asleep")]
    assert health.probed("a", None, 100.0) == []
    assert not health.wants_canary("a", 100.0)  # a request would hang
    assert health.scraped(Scraped("a", 101.0, awake=True), 0, 101.0)[0] == [Returned("a", half_open=True)]


# -- soft signs and panic --------------------------------------------------------------------------------------------


def test_three_failures_in_a_row_eject_and_a_success_between_them_forgives() -> None:
    health = fleet("a", "b")
    assert fail(health, "a", 1.0, times=2) == []
    assert health.sign("a", Sign.OK, 1.0) == []
    assert fail(health, "a", 1.0, times=2) == []
    assert fail(health, "a", 1.0, times=1) == [Ejected("a", "reset", statistical=True)]


def test_half_of_ten_attempts_failed_within_the_window_ejects() -> None:
    health = fleet("a", "b")
    for now in range(4):
        health.sign("a", Sign.OK, float(now))
        assert health.sign("a", Sign.ERROR_STATUS, now + 0.5) == []
    health.sign("a", Sign.OK, 5.0)
    assert health.sign("a", Sign.ERROR_STATUS, 5.5) == [Ejected("a", "error_status", statistical=True)]


def test_failures_older_than_the_window_do_not_count() -> None:
    health = fleet("a", "b")
    for now in range(4):
        health.sign("a", Sign.OK, float(now))
        health.sign("a", Sign.ERROR_STATUS, now + 0.5)
    health.sign("a", Sign.OK, 50.0)
    assert health.sign("a", Sign.ERROR_STATUS, 50.5) == []


def test_a_client_s_mistake_and_a_full_queue_never_count() -> None:
    health = fleet("a", "b")
    assert fail(health, "a", 1.0, Sign.CLIENT_ERROR, times=50) == []
    assert fail(health, "a", 1.0, Sign.BACKPRESSURE, times=50) == []


def test_panic_no_more_than_half_goes_by_statistics() -> None:
    health = fleet("a", "b", "c", "d")
    assert fail(health, "a", 1.0) == [Ejected("a", "reset", statistical=True)]
    assert fail(health, "b", 1.0) == [Ejected("b", "reset", statistical=True)]
    assert fail(health, "c", 1.0, times=20) == []
    assert [health.available(r) for r in "abcd"] == [False, False, True, True]


def test_panic_does_not_keep_a_replica_in_that_refuses_connects() -> None:
    health = fleet("a", "b")
    assert health.sign("a", Sign.REFUSED, 1.0) == [Ejected("a", "refused")]
    assert health.sign("b", Sign.REFUSED, 1.0) == [Ejected("b", "refused")]


def test_a_hard_ejection_lets_the_statistically_ejected_back_in() -> None:
    health = fleet("a", "b")
    assert fail(health, "a", 1.0) == [Ejected("a", "reset", statistical=True)]
    assert health.sign("b", Sign.REFUSED, 1.5) == [Ejected("b", "refused"), Returned("a", half_open=True)]


def test_a_draining_replica_is_not_counted_as_one_that_could_serve() -> None:
    health = fleet("a", "b", "c")
    assert health.drain("c", True, 1.0) == []
    assert not health.available("c")
    assert fail(health, "a", 1.0) == [Ejected("a", "reset", statistical=True)]
    assert fail(health, "b", 1.0) == []
    assert health.drain("c", False, 2.0) == []
    assert health.available("c")


def test_panic_is_judged_for_each_model() -> None:
    health = fleet("a", "b", "c", "d")
    for replica, model in zip("abcd", ("one", "one", "two", "two"), strict=True):
        health.serves(replica, frozenset({model}), 0.0)
    assert fail(health, "a", 1.0) == [Ejected("a", "reset", statistical=True)]
    assert fail(health, "b", 1.0) == []  # three of four are in, but model one would have none
    assert fail(health, "c", 1.0) == [Ejected("c", "reset", statistical=True)]


# -- half-open and back-off ------------------------------------------------------------------------------------------


def test_three_successes_after_a_return_close_the_case() -> None:
    health = fleet("a", "b")
    health.sign("a", Sign.REFUSED, 0.0)
    health.probed("a", None, 2.0)
    assert health.sign("a", Sign.OK, 2.1) == []
    assert health.sign("a", Sign.OK, 2.2) == []
    assert health.sign("a", Sign.OK, 2.3) == [Returned("a")]
    assert health.records["a"].ejections == 0


def test_one_failure_while_half_open_ejects_again_for_longer() -> None:
    health = fleet("a", "b")
    health.sign("a", Sign.REFUSED, 0.0)
    health.probed("a", None, 2.0)
    assert health.sign("a", Sign.RESET, 3.0) == [Ejected("a", "reset", statistical=True)]
    assert health.records["a"].until == 7.0  # 4 s


def test_news_of_attempts_from_before_the_ejection_change_nothing() -> None:
    health = fleet("a", "b")
    health.sign("a", Sign.REFUSED, 0.0)
    assert fail(health, "a", 0.1, times=9) == []
    assert health.sign("a", Sign.REFUSED, 0.2) == []
    assert health.records["a"].until == 2.0


def test_without_canaries_the_end_of_the_back_off_is_enough() -> None:
    health = fleet("a", canary=False)
    health.sign("a", Sign.ABORT, 0.0)
    assert health.wake(1.9) == []
    assert health.wake(2.0) == [Returned("a", half_open=True)]


def test_signs_about_a_removed_replica_are_ignored() -> None:
    health = fleet("a")
    health.remove("a", 1.0)
    assert health.sign("a", Sign.REFUSED, 1.0) == []
    assert health.probed("a", None, 1.0) == []
    assert health.scraped(Scraped("a"), 1, 1.0) == ([], False)


@given(st.integers(1, 40), st.floats(0.1, 10), st.floats(1, 100))
def test_back_off_doubles_and_is_capped(times: int, first_s: float, cap_factor: float) -> None:
    cap_s = first_s * cap_factor
    health = fleet("a", backoff_s=first_s, backoff_max_s=cap_s)
    now = 0.0
    for n in range(times):
        health.sign("a", Sign.REFUSED, now)
        expected = min(first_s * 2**n, cap_s)
        assert math.isclose(health.records["a"].until - now, expected, rel_tol=1e-6)
        now = health.records["a"].until
        health.probed("a", None, now)


class AnyFleet(RuleBasedStateMachine):
    """Any order of events: statistics never leave fewer than half, and events tell the core the truth."""

    def __init__(self) -> None:
        super().__init__()
        self.health = FleetHealth(Health())
        self.now = 0.0
        self.told: dict[str, bool] = {}
        self.made = 0

    def hear(self, events: list[FleetEvent]) -> None:
        for event in events:
            if isinstance(event, Ejected):
                self.told[event.replica_id] = False
            elif isinstance(event, Returned):
                self.told[event.replica_id] = True

    @rule(up=st.booleans(), models=st.sets(st.sampled_from(["m", "n"]), max_size=2))
    def add(self, up: bool, models: set[str]) -> None:
        self.made += 1
        name = f"r{self.made}"
        self.told[name] = True
        self.health.add(name, self.now)
        self.hear(self.health.serves(name, frozenset(models), self.now))
        self.hear(self.health.announced(name))
        if up:
            self.hear(self.health.probed(name, None, self.now))

    @precondition(lambda self: self.told)
    @rule(data=st.data(), sign=st.sampled_from(list(Sign)), times=st.integers(1, 4))
    def sign(self, data: st.DataObject, sign: Sign, times: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.told)))
        for _ in range(times):
            self.hear(self.health.sign(name, sign, self.now))

    @precondition(lambda self: self.told)
    @rule(data=st.data(), failure=st.sampled_from([None, None, Sign.REFUSED, Sign.PROBE_FAILED, Sign.PROBE_LATE]))
    def probe(self, data: st.DataObject, failure: Sign | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.told)))
        self.hear(self.health.probed(name, failure, self.now))
        if self.health.wants_canary(name, self.now):
            self.hear(self.health.canaried(name, failure, self.now))

    @precondition(lambda self: self.told)
    @rule(data=st.data(), draining=st.booleans())
    def drain(self, data: st.DataObject, draining: bool) -> None:
        self.hear(self.health.drain(data.draw(st.sampled_from(sorted(self.told))), draining, self.now))

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.told)))
        del self.told[name]
        self.hear(self.health.remove(name, self.now))

    @rule(seconds=st.floats(0, 100))
    def time(self, seconds: float) -> None:
        self.now += seconds
        self.hear(self.health.wake(self.now))

    @invariant()
    def statistics_leave_half_of_each_model(self) -> None:
        records = self.health.records.values()
        for r in records:
            if r.phase is Phase.OUT and r.statistical and not r.draining:
                for model in r.models or {""}:
                    peers = [o for o in records if not o.draining and (model in o.models or not o.models)]
                    assert sum(o.in_rotation for o in peers) >= len(peers) / 2

    @invariant()
    def the_core_was_told(self) -> None:
        assert self.told == {name: r.in_rotation for name, r in self.health.records.items()}


TestAnyFleet = AnyFleet.TestCase
TestAnyFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_every_sign_has_one_weight() -> None:
    assert not HARD & SOFT
