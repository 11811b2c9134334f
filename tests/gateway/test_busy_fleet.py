"""Replicas that are late because they are busy: ejecting them would leave more to the others, and then to nobody."""

from __future__ import annotations

from gateway.signals import Sign
from policies.model import Ejected, FleetEvent, Returned
from tests.gateway.test_health import fail, fleet


def test_a_fleet_too_busy_to_accept_connections_keeps_half_of_itself_and_the_rest_is_back_with_a_good_probe() -> None:
    health = fleet("a", "b")
    assert fail(health, "a", 1.0, Sign.CONNECT_TIMEOUT) == [Ejected("a", "connect_timeout", statistical=True)]
    assert fail(health, "b", 1.0, Sign.CONNECT_TIMEOUT, times=50) == []
    assert health.probed("a", None, 3.5) == [Returned("a", half_open=True)]


def test_a_replica_that_answers_requests_is_not_ejected_because_it_is_too_busy_for_health() -> None:
    """When all are that busy they would go one after the other, each leaving more to the rest."""
    health = fleet("a")
    for second in range(2, 20, 2):
        health.sign("a", Sign.OK, second - 1.0)
        assert health.probed("a", Sign.PROBE_LATE, second) == []
    assert health.probed("a", Sign.PROBE_LATE, 20.0) == []
    assert health.probed("a", Sign.PROBE_LATE, 22.0) == [Ejected("a", "probe_late")]


def test_a_health_that_answers_something_else_is_believed_whatever_the_replica_answers_to_others() -> None:
    health = fleet("a")
    said: list[FleetEvent]
    for second, said in ((2.0, []), (4.0, [Ejected("a", "probe_failed")])):
        health.sign("a", Sign.OK, second - 1.0)
        assert health.probed("a", Sign.PROBE_FAILED, second) == said


def test_what_was_answered_before_an_ejection_excuses_nothing_after_it() -> None:
    health = fleet("a")
    health.probed("a", None, 0.5)
    health.sign("a", Sign.OK, 1.0)
    assert health.sign("a", Sign.REFUSED, 1.5) == [Ejected("a", "refused")]
    assert health.probed("a", None, 3.5) == [Returned("a", half_open=True)]
    assert health.probed("a", Sign.PROBE_LATE, 5.5) == []
    assert health.probed("a", Sign.PROBE_LATE, 7.5) == [Ejected("a", "probe_late")]


def test_a_host_that_is_gone_is_ejected_by_probes_whatever_is_left() -> None:
    health = fleet("a", "b")
    for replica in ("a", "b"):
        assert health.probed(replica, Sign.PROBE_LATE, 1.0) == []
        assert health.probed(replica, Sign.PROBE_LATE, 3.0) == [Ejected(replica, "probe_late")]
