"""A trial by itself: what counts for an arm, what stops one, and what is kept."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gateway.experiment_merge import merged
from gateway.experiment_results import results
from gateway.experiment_table import Experiment
from gateway.record import RequestRecord, Tokens, TokenSource
from gateway.trial import Trial, read
from policies.clusters import REQUESTS
from policies.guard import breach, share, window
from policies.model import Outcome, Request
from policies.objectives import Objectives, Partition

START = 1_800_000_000.0


def trial(**keys: Any) -> Trial:
    arms = keys.pop("arms", [{"name": "control"}, {"name": "new", "policy": "least_work"}])
    table = Experiment.model_validate({"name": "x", "swing": 0.0, "wash_s": 0.0, **keys, "arms": arms})
    return Trial(table, table.plan(START))


def record(
    unix: float, partition: Partition = Partition.GOOD, prompt_tokens: int = 500, **fields: Any
) -> RequestRecord:
    made = RequestRecord("r", 0.0, received_unix=unix, partition=partition, outcome=Outcome.SUCCESS, **fields)
    made.prompt = Tokens(prompt_tokens, TokenSource.USAGE)
    made.objectives = Objectives(ttft_s=2.0, tpot_s=0.1)
    return made


def feed(
    t: Trial, n: int, attainment: tuple[float, float], rate_rps: float = 20.0, seed: int = 0, since_s: float = 0.0
) -> float | None:
    """Requests of many sessions; answers when the guard rails stopped the new arm, in seconds."""
    rng = random.Random(seed)
    begin = START + since_s
    for i in range(n):
        unix = begin + i / rate_rps
        request = Request(f"r{i}", session=f"s{rng.randrange(400)}")
        given = t.assign(request, unix)
        assert given is not None
        good = rng.random() < attainment[given.arm]
        t.finished(record(unix, Partition.GOOD if good else Partition.SLOW_TTFT), given)
        if i % int(rate_rps) == 0:
            found = t.judge(unix)
            if found is not None:
                t.stop_arm(found.arm, found.reason, unix)
                return unix - begin
    return None


def test_a_bad_arm_is_stopped_within_a_minute_and_its_traffic_returns() -> None:
    t = trial()
    at = feed(t, 1200, (0.93, 0.70))
    assert at is not None
    assert at <= 60.0
    assert not t.running
    assert t.why_stopped["new"].startswith("attainment is 2")
    told = results(t, START + 100.0)
    assert [arm["state"] for arm in told["arms"]] == ["ended", "stopped"]
    assert told["arms"][1]["difference"]["estimate"] < -0.15
    low, high = told["arms"][0]["attainment_interval"]
    assert told["arms"][0]["goodput_interval"] == pytest.approx(
        [told["offered_rps"] * low, told["offered_rps"] * high], rel=1e-3
    )
    request = Request("later", session="s1")
    t.assign(request, START + 200.0)
    assert request.arm == "control"


def test_an_arm_that_was_good_for_a_day_is_stopped_within_a_minute_and_a_half_of_turning_bad() -> None:
    t = trial()
    for bucket in range(256):
        for arm in (0, 1):
            t.guard.rows.setdefault((arm, 0), {})[bucket] = [3_000.0, 2_800.0, 0.0, 0.0, 0.0, 27_000.0]
    at = feed(t, 1800, (0.93, 0.50), since_s=86_400.0)
    assert at is not None
    assert at <= 90.0
    assert breach(t.table.rails(), 2, 1, t.guard) is None, "over the day it is not bad at all"
    assert "below the control's, at least" in t.why_stopped["new"]
    assert ", in the last " in t.why_stopped["new"]


def test_windows_share_what_chance_they_have_to_stop_a_good_arm() -> None:
    plan = trial().plan
    first = window(plan, START)
    assert [share(plan, first + k) for k in range(3)] == [0.25, pytest.approx(0.5 / 6), pytest.approx(0.5 / 12)]
    assert sum(share(plan, first + k) for k in range(100_000)) == pytest.approx(0.5, abs=1e-4)
    turns = trial(design="switchback", slice_s=900.0).plan
    assert window(turns, START + 3600.0) - window(turns, START) == 1, "as long as two blocks of slices"


def test_an_equal_and_a_slightly_worse_arm_go_on() -> None:
    assert all(feed(trial(), 2400, (0.93, 0.93), seed=seed) is None for seed in range(5))
    assert all(feed(trial(), 2400, (0.93, 0.90), seed=seed) is None for seed in range(5))


def test_requests_that_never_end_tell_against_their_arm_as_soon_as_they_are_late() -> None:
    t = trial()
    waiting = []
    for i in range(400):
        unix = START + i / 20.0
        given = t.assign(Request(f"r{i}", session=f"s{i % 97}"), unix)
        assert given is not None
        if given.arm == 0:
            t.finished(record(unix), given)
        else:
            waiting.append((given, START + 30.0 - unix))
    assert t.judge(START + 30.0) is None, "the arm has no request that ended"
    t.look(waiting, START + 30.0)
    found = t.judge(START + 30.0)
    assert found is not None
    assert found.reason.startswith("attainment is 100.0% below the control's")
    assert [arm["watched"]["attainment"] for arm in results(t, START + 30.0)["arms"]] == [1.0, 0.0]
    assert read(t.document()).guard.total(1, REQUESTS) == 0, "who is late is counted for good when it ends"
    t.look([], START + 31.0)
    assert t.judge(START + 30.0) is None


def test_what_an_experiment_before_left_open_is_not_this_ones() -> None:
    t = trial()
    given = t.assign(Request("r", session="s"), START)
    assert given is not None
    t.look([(given, 60.0)], START + 30.0)
    t.finished(record(START - 30.0), given)
    assert t.watched().total(given.arm, REQUESTS) == t.counts.buckets.total(given.arm, REQUESTS) == 0


def test_one_of_three_arms_is_stopped_and_the_others_are_compared_on() -> None:
    t = trial(
        arms=[{"name": "control"}, {"name": "bad", "policy": "least_work"}, {"name": "good", "policy": "lmetric"}]
    )
    assert feed(t, 2400, (0.93, 0.5, 0.93)) is not None
    assert t.running
    assert t.plan.stopped == {1}
    before = t.counts.buckets.total(2, REQUESTS)
    for i in range(200):
        unix = START + 500.0 + i
        given = t.assign(Request(f"n{i}", session=f"n{i}"), unix)
        assert given is not None
        assert given.arm != 1
        t.finished(record(unix), given)
    assert t.counts.buckets.total(2, REQUESTS) > before


def test_what_the_client_got_wrong_counts_for_nobody_and_what_was_shed_does() -> None:
    t = trial()
    request = Request("r", session="s")
    given = t.assign(request, START + 1.0)
    assert given is not None
    wrong = record(START + 1.0, Partition.ERROR_HTTP)
    wrong.outcome = Outcome.CLIENT_ERROR
    t.finished(wrong, given)
    assert t.counts.buckets.total(given.arm, REQUESTS) == 0
    shed = record(START + 1.0, Partition.REJECTED)
    shed.outcome = Outcome.SHED
    t.finished(shed, given)
    assert t.counts.buckets.total(given.arm, REQUESTS) == 1


def test_a_request_that_only_one_replica_may_have_takes_no_part() -> None:
    t = trial()
    request = Request("r", session="s", pinned="a")
    assert t.assign(request, START) is None
    assert request.arm is None


def test_results_are_told_by_class_and_by_length_of_the_prompt() -> None:
    t = trial()
    for i in range(60):
        given = t.assign(Request(f"r{i}", session=f"s{i}"), START + i)
        assert given is not None
        name = "interactive" if i % 2 else "batch"
        t.finished(record(START + i, service_class=name, prompt_tokens=100 if i % 3 else 50_000), given)
    told = results(t, START + 60.0)
    assert list(told["strata"]) == [
        "class batch",
        "class interactive",
        "prompt 16k and more",
        "prompt below 1k",
    ]
    assert sum(arm["requests"] for arm in told["strata"]["class batch"]) == 30
    assert sum(arm["requests"] for arm in told["strata"]["prompt 16k and more"]) == 20


def test_an_a_a_run_and_keyless_requests_are_said() -> None:
    t = trial(arms=[{"name": "a"}, {"name": "b"}])
    for i in range(4):
        t.assign(Request(f"r{i}", session="s" if i == 0 else None), START + i)
    notes = results(t, START + 10.0)["notes"]
    assert "A/A: the arms are the same, so every difference here is noise" in notes
    assert "75% of requests have no session: they are assigned one by one" in notes


def test_an_experiment_by_request_or_tenant_assigns_by_that() -> None:
    by_request, by_tenant = trial(key="request"), trial(key="tenant")
    arms: dict[str, set[str | None]] = {"request": set(), "tenant": set()}
    for i in range(40):
        for name, t in (("request", by_request), ("tenant", by_tenant)):
            request = Request(f"r{i}", session="s", tenant="acme")
            t.assign(request, START + i)
            arms[name].add(request.arm)
    assert arms["request"] == {"control", "new"}
    assert len(arms["tenant"]) == 1
    assert results(by_request, START + 60.0)["notes"] == results(by_tenant, START + 60.0)["notes"]


def test_a_trial_is_read_back_as_it_was_written() -> None:
    t = trial(design="switchback", slice_s=60.0)
    feed(t, 4000, (0.93, 0.9))
    t.weigh({"new": 2.0}, START + 300.0)
    again = read(t.document())
    assert again.document() == t.document()
    assert again.plan == t.plan
    assert results(again, START + 400.0) == results(t, START + 400.0)


def test_two_gateways_together_know_what_one_would_know() -> None:
    whole, parts = trial(), [trial(), trial()]
    rng = random.Random(1)
    for i in range(1000):
        unix, session = START + i, f"s{rng.randrange(100)}"
        partition = Partition.GOOD if rng.random() < 0.9 else Partition.SLOW_TPOT
        for t in (whole, parts[i % 2]):
            given = t.assign(Request(f"r{i}", session=session), unix)
            assert given is not None
            t.finished(record(unix, partition), given)
    assert results(merged(parts), START + 1000.0) == results(whole, START + 1000.0)


def test_gateways_that_differ_are_not_added_up() -> None:
    other = trial()
    other.weigh({"new": 3.0}, START)
    with pytest.raises(ValueError, match="set the same with"):
        merged([trial(), other])
    with pytest.raises(ValueError, match="different tables"):
        merged([trial(), trial(seed=9)])
