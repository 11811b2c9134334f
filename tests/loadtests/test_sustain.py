"""A generator that did not keep its schedule yields INVALID, with the reason."""

from __future__ import annotations

from loadtests.sustain import Sustained, lag_bound_s, verdict


def part(**more: object) -> Sustained:
    good = Sustained([0.001] * 100, [0.0005] * 100, 0.3, 100, 100)
    for name, value in more.items():
        setattr(good, name, value)
    return good


def test_a_generator_on_time_is_valid() -> None:
    kept = verdict([part()], 2.0)
    assert kept.reasons == ()
    assert (kept.lag_p99_s, kept.due, kept.processes) == (0.001, 100, 1)


def test_the_bound_is_two_percent_of_a_tight_objective() -> None:
    assert lag_bound_s(2.0) == 0.02
    assert lag_bound_s(0.5) == 0.01
    assert lag_bound_s(None) == 0.02


def test_late_sends_void_the_run() -> None:
    assert verdict([part(lags_s=[0.001] * 98 + [0.03] * 2)], 2.0).reasons == (
        "lag p99 30.0 ms is over 20.0 ms: use a quieter machine, or more --workers",
    )


def test_one_very_late_send_voids_the_run() -> None:
    assert verdict([part(lags_s=[0.001] * 999 + [0.3])], 2.0).reasons == (
        "lag max 300 ms is over 250 ms: use a quieter machine, or more --workers",
    )


def test_a_stalled_loop_of_one_process_is_not_hidden_by_the_others() -> None:
    (reason,) = verdict([part(), part(), part(stalls_s=[0.05] * 100)], 2.0).reasons
    assert reason == "sending loop stalled: p99 50.0 ms is over 20.0 ms: use a quieter machine, or more --workers"


def test_rows_never_sent_void_the_run() -> None:
    assert verdict([part(due=101)], 2.0).reasons == (
        "1 of 101 due requests were never dispatched: use a quieter machine, or more --workers",
    )


def test_a_busy_generator_and_local_errors_void_the_run() -> None:
    reasons = verdict([part(cpu_share=0.93, local_errors=2)], 2.0).reasons
    assert reasons == (
        "generator used 93% of its core, over 80%: use more --workers",
        "2 local errors (file descriptors or ports): raise ulimit -n",
    )
