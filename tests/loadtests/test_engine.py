"""One replica in virtual time: budget, chunks, cache, queue, preemption, and many steps as one."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.engine import Engine, EngineConfig, Job
from loadtests.profiles import Profile

# one millisecond a step, plus a millisecond a token: times can be added by hand
PLAIN = Profile(
    "plain", 0.0, 0.001, 0.001, 0.0, 0.0, num_blocks=1001, block_size=16, max_num_batched_tokens=64, max_num_seqs=8
)


def finish(engine: Engine, now: float = 0.0, until: float | None = None) -> float:
    while (step := engine.step(now, until)) is not None:
        now = step.end
    return now


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    engine = Engine(EngineConfig(PLAIN))
    engine.add(job := Job("a", prompt_tokens=150, output_tokens=3), 0.0)
    ends, now = [], 0.0
    while (step := engine.step(now)) is not None:
        ends.append((round(step.end, 3), step.prefill_tokens, step.tokens))
        now = step.end
    assert ends == [(0.065, 64, 0), (0.130, 64, 0), (0.153, 22, 1), (0.155, 0, 1), (0.157, 0, 1)]
    assert job.first_token_at == pytest.approx(0.153)
    assert job.finished_at == pytest.approx(0.157)
    assert (job.state, job.outputs) == ("finished", 3)


def test_decodes_come_first_and_the_chunk_gets_the_rest_of_the_budget() -> None:
    engine = Engine(EngineConfig(PLAIN, async_scheduling=False))
    engine.add(Job("a", 10, 100), 0.0)
    step = engine.step(0.0)
    assert step is not None
    engine.add(Job("b", 200, 5), 0.001)
    step = engine.step(step.end)
    assert step is not None
    assert (step.decoded, step.prefill_tokens) == (1, 63)


def test_with_asynchronous_scheduling_an_arrival_waits_for_the_step_after_the_next() -> None:
    engine = Engine(EngineConfig(PLAIN))
    engine.add(Job("a", 10, 100), 0.0)
    first = engine.step(0.0)
    assert first is not None
    engine.add(Job("b", 20, 5), 0.001)
    second = engine.step(first.end)
    assert second is not None
    assert second.prefill_tokens == 0
    third = engine.step(second.end)
    assert third is not None
    assert third.prefill_tokens == 20


def test_a_hit_is_whole_blocks_and_at_most_the_prompt_less_one_token() -> None:
    engine = Engine(EngineConfig(PLAIN))
    chain = [1, 2, 3, 4]
    for name in ("cold", "warm"):
        engine.add(Job(name, 64, 1, chain), 0.0)
        finish(engine)
    engine.add(longer := Job("longer", 65, 1, [*chain, 5]), 0.0)
    finish(engine)
    engine.add(warm := Job("again", 64, 1, chain), 0.0)
    finish(engine)
    assert (warm.cached_tokens, longer.cached_tokens) == (48, 64)
    assert (engine.counters.prefix_queries, engine.counters.prefix_hits) == (257, 160)


def test_the_answer_sent_back_is_a_hit_when_its_ids_are_known() -> None:
    engine = Engine(EngineConfig(PLAIN))
    engine.add(Job("turn 1", 40, 60, [1, 2, 3, 4, 5, 6, 7]), 0.0)  # 99 tokens are computed: six whole blocks
    finish(engine)
    engine.add(turn_2 := Job("turn 2", 120, 4, [1, 2, 3, 4, 5, 6, 8, 9]), 9.0)
    finish(engine, 9.0)
    assert turn_2.cached_tokens == 96


def test_an_adapter_has_its_own_cache() -> None:
    engine = Engine(EngineConfig(PLAIN, max_loras=2))
    for name, adapter in (("a", None), ("b", "french"), ("c", "french"), ("d", "german")):
        engine.add(job := Job(name, 64, 1, [1, 2, 3, 4], adapter=adapter), 0.0)
        finish(engine)
        assert job.cached_tokens == (48 if name == "c" else 0)


def test_a_job_without_a_lora_slot_is_passed_and_counted_as_deferred() -> None:
    engine = Engine(EngineConfig(PLAIN, max_loras=1, lora_load_s=0.5))
    for name, adapter in (("a", "french"), ("b", "german"), ("c", None)):
        engine.add(Job(name, 10, 4, adapter=adapter), 0.0)
    step = engine.step(0.0)
    assert step is not None
    assert [job.id for job in step.first] == ["a", "c"]
    assert step.end == pytest.approx(0.5 + 0.021)
    engine.step(step.end)
    assert (engine.gauges(step.end).waiting, engine.gauges(step.end).deferred) == (1, 1)


def test_the_whole_prompt_must_fit_and_the_head_of_the_queue_is_not_passed() -> None:
    engine = Engine(EngineConfig(PLAIN, num_blocks=11, max_num_batched_tokens=32, max_model_len=160))
    engine.add(Job("holds 5", 70, 5), 0.0)
    now = 0.0
    for _ in range(3):
        step = engine.step(now)
        assert step is not None
        now = step.end
    engine.add(Job("needs 6", 90, 2), now)
    engine.add(Job("needs 1", 10, 2), now)
    while "holds 5" in engine.running:
        assert list(engine.running) == ["holds 5"]
        step = engine.step(now)
        assert step is not None
        now = step.end
    assert list(engine.running) == ["needs 6"]


def test_the_youngest_is_preempted_to_the_front_and_its_tokens_are_not_sent_again() -> None:
    engine = Engine(EngineConfig(PLAIN, num_blocks=11, max_model_len=160))
    old, young = Job("old", 64, 60, [1, 2, 3, 4]), Job("young", 60, 60, [5, 6, 7, 8])
    engine.add(old, 0.0)
    engine.add(young, 0.0)
    engine.add(Job("last", 10, 1), 0.0)
    now, tokens = 0.0, {"old": 0, "young": 0, "last": 0}
    preempted: list[str] = []
    while (step := engine.step(now)) is not None:
        preempted += [job.id for job in step.preempted]
        for job in [*engine.decoding.values(), *step.first, *step.resumed]:
            tokens[job.id] += 1
        now = step.end
    assert preempted == ["young"]
    assert tokens == {"old": 60, "young": 60, "last": 1}
    assert engine.counters.generation_tokens == 121
    assert engine.counters.prefix_queries == 134  # the second lookup is not counted
    assert engine.pool.free == 10


def test_priority_takes_the_lowest_value_first_and_preempts_the_highest() -> None:
    engine = Engine(EngineConfig(PLAIN, num_blocks=9, max_model_len=128, scheduling_policy="priority", max_num_seqs=2))
    for name, priority in (("batch", 5), ("urgent", 0), ("normal", 1)):
        engine.add(Job(name, 60, 40, priority=priority), 0.0)
    engine.step(0.0)
    assert list(engine.running) == ["urgent", "normal"]
    finish(engine, engine.current.end if engine.current else 0.0)
    assert engine.counters.finished == 3


def test_queue_limits_refuse_by_name() -> None:
    engine = Engine(EngineConfig(PLAIN, max_num_queued_reqs=2))
    assert [engine.add(Job(n, 10, 5), 0.0) for n in "abc"] == [None, None, "max_num_queued_reqs"]
    engine = Engine(EngineConfig(PLAIN, max_num_queued_tokens=100))
    assert [engine.add(Job(n, 60, 5), 0.0) for n in "abc"] == [None, None, "max_num_queued_tokens"]
    finish(engine)
    assert engine.add(Job("d", 60, 5), 9.0) is None


def test_a_prompt_that_cannot_fit_is_refused_by_value() -> None:
    with pytest.raises(ValueError, match="max_model_len is 100"):
        Engine(EngineConfig(PLAIN, max_model_len=100)).add(Job("a", 100, 5), 0.0)


def test_cancel_frees_the_blocks_when_the_step_ends() -> None:
    engine = Engine(EngineConfig(PLAIN))
    engine.add(job := Job("a", 60, 50), 0.0)
    step = engine.step(0.0)
    assert step is not None
    assert engine.cancel(job, 0.01)
    assert step.first == []
    assert engine.step(step.end) is None
    assert (job.state, engine.unfinished, engine.gauges(1.0).kv_usage) == ("aborted", 0, 0.0)


def test_gauges_move_at_the_end_of_a_step_only() -> None:
    engine = Engine(EngineConfig(PLAIN))
    engine.add(Job("a", 64, 5), 0.0)
    step = engine.step(0.0)
    assert step is not None
    engine.add(Job("b", 64, 5), 0.01)
    assert (engine.gauges(0.02).running, engine.gauges(0.02).waiting) == (0, 0)
    engine.step(step.end)
    seen = engine.gauges(step.end)
    assert (seen.running, seen.waiting, seen.kv_usage) == (1, 0, pytest.approx(4 / 1000))


# -- many steps as one -------------------------------------------------------------------------------------------

TIGHT = Profile(
    "tight", 0.004, 0.001, 0.0001, 1e-7, 1e-9, 0.0005, 1e-5,
    num_blocks=61, block_size=4, max_num_batched_tokens=24, max_num_seqs=6,
)  # fmt: skip

arrivals = st.lists(
    st.tuples(
        st.floats(0, 0.5),  # when
        st.integers(1, 90),  # prompt tokens
        st.integers(1, 60),  # output tokens
        st.integers(0, 3),  # which shared prefix
        st.integers(0, 4),  # priority
        st.one_of(st.none(), st.floats(0, 1.5)),  # client leaves after
    ),
    min_size=1,
    max_size=14,
)


def story(rows, config: EngineConfig, horizon: float | None):  # type: ignore[no-untyped-def]
    """Runs arrivals and cancels; what every job and every gauge reading came to."""
    engine, jobs, events, readings = Engine(config), [], [], []
    for i, (when, prompt, output, prefix, priority, leaves) in enumerate(rows):
        chain = [prefix * 100 + u if u < 12 else 1000 * (i + 1) + u for u in range(-(-prompt // 4))]
        jobs.append(job := Job(f"r{i}", prompt, output, chain, priority))
        events.append((when, i, "add", job))
        if leaves is not None:
            events.append((when + leaves, i, "cancel", job))
    events += [(0.0137 * i, -1, "read", jobs[0]) for i in range(150)]
    events.sort(key=lambda e: e[:2])

    def step(now: float) -> None:
        engine.step(now, None if horizon is None else now + horizon)

    for when, _, what, job in [*events, (inf, 0, "end", jobs[0])]:
        while engine.current is not None and engine.current.end <= when:
            step(engine.current.end)
        if what == "add":
            engine.add(job, when)
        elif what == "cancel":
            engine.cancel(job, when)
        elif what == "read":
            tick, at = engine.progress(when)
            readings.append((engine.gauges(when), tick, at if engine.current else None, engine.outputs(job, tick)))
        if engine.current is None and what != "end":
            step(when)
    outcomes = [
        (j.state, j.admitted_at, j.first_token_at, j.finished_at, j.cached_tokens, j.preemptions, j.outputs)
        for j in jobs
    ]
    assert engine.pool.free == engine.pool.usable
    assert all(j.outputs == j.output_tokens for j in jobs if j.state == "finished")
    return outcomes, readings, engine.counters


@given(arrivals, st.sampled_from(["fcfs", "priority"]), st.sampled_from([0, 5]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_many_steps_as_one_give_the_same_times_tokens_and_gauges(rows, policy, threshold, overlap) -> None:  # type: ignore[no-untyped-def]
    config = EngineConfig(
        TIGHT, scheduling_policy=policy, long_prefill_token_threshold=threshold, async_scheduling=overlap
    )
    assert story(rows, config, None) == story(rows, config, inf)


@given(arrivals, st.floats(0.001, 0.2))
@settings(max_examples=60, deadline=None)
def test_a_horizon_bounds_a_step_and_changes_nothing_else(rows, horizon) -> None:  # type: ignore[no-untyped-def]
    assert story(rows, EngineConfig(TIGHT), None) == story(rows, EngineConfig(TIGHT), horizon)
