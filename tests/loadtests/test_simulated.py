"""Lag of simulated replicas, from the text of their /metrics."""

from __future__ import annotations

from loadtests.simulated import quantile, read, reasons


def metrics(*counts: int) -> str:
    bounds = ("0.001", "0.005", "0.01", "0.05", "+Inf")
    lines = [
        f'forebay_sim_lag_seconds_bucket{{replica="sim-0",le="{b}"}} {n}.0' for b, n in zip(bounds, counts, strict=True)
    ]
    return "\n".join(["# TYPE forebay_sim_lag_seconds histogram", *lines, "vllm:num_requests_running 3"])


def test_the_lag_of_one_run_is_what_was_gained_in_it() -> None:
    before, after = read(metrics(0, 0, 0, 50, 50)), read(metrics(90, 100, 100, 150, 150))
    assert quantile(before, after, 0.5) == 0.001
    assert quantile(before, after, 0.99) == 0.005
    assert reasons({"u": before}, {"u": after}) == []


def test_a_fleet_that_woke_late_voids_the_run() -> None:
    (reason,) = reasons({}, {"http://r": read(metrics(90, 95, 97, 100, 100))})
    assert reason == "simulated replica http://r woke late: lag p99 up to 50 ms is over 10 ms"


def test_a_real_replica_is_not_judged() -> None:
    assert read("vllm:num_requests_running 3\n") == {}
    assert quantile({}, {}, 0.99) is None
