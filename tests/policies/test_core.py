"""A request in the core, told event by event. The rule here is three lines, so that only the core is tested."""

from __future__ import annotations

import random

import pytest

from policies import POLICIES, make
from policies.classes import DEFAULT_CLASSES
from policies.core import Balancer
from policies.model import (
    Added,
    Choice,
    Dispatch,
    Draining,
    Ejected,
    FleetView,
    Hold,
    Outcome,
    Removed,
    Request,
    Restarted,
    Returned,
    Shed,
    Usage,
)
from policies.policy import NONE_AVAILABLE, Stateless, least
from policies.settings import Settings


class FewestOpen(Stateless):
    name = "fewest_open"

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        up = fleet.available()
        if not up:
            return NONE_AVAILABLE
        scores = [float(r.in_flight) for r in up]
        at = least(up, scores)
        return Choice(up[at].id, "load", tuple((r.id, s) for r, s in zip(up, scores, strict=True)))


def balancer(*replicas: str, settings: Settings | None = None) -> Balancer:
    made = Balancer(DEFAULT_CLASSES, FewestOpen(), settings or Settings().without_science(), random.Random(1))
    for name in replicas:
        made.fleet_event(Added(name, prefill_rate=1000.0), 0.0)
    return made


def chat(name: str, tokens: int = 1000, **more: object) -> Request:
    return Request(name, prompt_tokens=tokens, **more)  # type: ignore[arg-type]


def shed_for(decisions: list[object]) -> str:
    (decision,) = decisions
    assert isinstance(decision, Shed)
    assert decision.retry_after_s is not None
    assert 0.8 <= decision.retry_after_s <= 1.2
    return decision.reason


def sent_to(decisions: list[object]) -> str:
    (decision,) = decisions
    assert isinstance(decision, Dispatch)
    return decision.replica_id


def test_a_request_from_receipt_to_end() -> None:
    b = balancer("a", "b")
    (decision,) = b.submit(chat("r1"), 0.0)
    assert isinstance(decision, Dispatch)
    assert (decision.replica_id, decision.reason) == ("a", "load")
    assert decision.prediction is not None
    assert decision.prediction.uncached_tokens == 1000
    assert [x.replica_id for x in decision.alternatives] == ["b"]
    assert (b.backlog_tokens("a", 0.0), b.prefilling("a"), b.prefilling("b")) == (1000.0, True, False)
    b.first_token("r1", 1.0)
    assert (b.backlog_tokens("a", 1.0), b.prefilling("a")) == (0.0, False)
    b.complete("r1", Outcome.SUCCESS, Usage(1000, 50, 0), 2.0)
    assert b.fleet.replicas["a"].ledger.in_flight == 0


def test_load_counts_from_the_decision_not_from_the_first_byte() -> None:
    b = balancer("a", "b")
    assert [sent_to(b.submit(chat(f"r{i}"), 0.0)) for i in range(4)] == ["a", "b", "a", "b"]


def test_events_that_come_late_twice_or_for_nobody_change_nothing() -> None:
    b = balancer("a")
    b.submit(chat("r1"), 0.0)
    for _ in range(2):
        b.first_token("r1", 1.0)
        b.complete("r1", Outcome.SUCCESS, None, 2.0)
        assert b.failed("r1", Outcome.ERROR, 2.0) == []
        assert b.cancel("nobody", 2.0) == []
    ledger = b.fleet.replicas["a"].ledger
    assert (ledger.in_flight, ledger.live_decodes, ledger.kv_tokens) == (0, 0, 0.0)


def test_a_failed_attempt_goes_elsewhere_and_in_the_end_nowhere() -> None:
    b = balancer("a", "b")
    assert sent_to(b.submit(chat("r1"), 0.0)) == "a"
    assert sent_to(b.failed("r1", Outcome.ERROR, 0.1)) == "b"
    assert shed_for(b.failed("r1", Outcome.ERROR, 0.2)) == "no_replica"
    assert [r.ledger.in_flight for r in b.fleet.replicas.values()] == [0, 0]


def test_nothing_goes_to_a_replica_that_is_out() -> None:
    b = balancer("a", "b", "c")
    b.fleet_event(Draining("a"), 0.0)
    b.fleet_event(Ejected("b", "refused"), 0.0)
    assert [sent_to(b.submit(chat(f"r{i}"), 0.0)) for i in range(3)] == ["c", "c", "c"]
    b.fleet_event(Returned("b"), 1.0)
    assert sent_to(b.submit(chat("r3"), 1.0)) == "b"
    b.fleet_event(Removed("b"), 2.0)
    b.fleet_event(Removed("c"), 2.0)
    assert shed_for(b.submit(chat("r4"), 2.0)) == "no_replica"


def test_statistical_ejection_never_takes_more_than_half_but_a_dead_replica_stays_out() -> None:
    b = balancer("a", "b", "c", "d")
    b.fleet_event(Ejected("a", "connect refused"), 0.0)
    for name in ("b", "c"):
        b.fleet_event(Ejected(name, "slow", statistical=True), 0.0)
    assert [sent_to(b.submit(chat(f"r{i}"), 0.0)) for i in range(3)] == ["b", "c", "d"]


def test_a_restart_empties_the_backlog_and_its_requests_still_end_once() -> None:
    b = balancer("a", "b")
    b.submit(chat("r1"), 0.0)
    b.fleet_event(Restarted("a"), 0.5)
    assert b.backlog_tokens("a", 0.5) == 0.0
    assert b.fleet.replicas["a"].ledger.in_flight == 1
    assert sent_to(b.failed("r1", Outcome.ERROR, 0.6)) == "b"
    assert b.fleet.replicas["a"].ledger.in_flight == 0


def test_a_replica_serves_only_its_models_and_adapters() -> None:
    b = balancer()
    b.fleet_event(Added("llama", models=frozenset({"llama"}), adapters=frozenset({"sql"})), 0.0)
    b.fleet_event(Added("qwen", models=frozenset({"qwen"})), 0.0)
    assert sent_to(b.submit(chat("r1", model="qwen"), 0.0)) == "qwen"
    assert sent_to(b.submit(chat("r2", model="sql"), 0.0)) == "llama"
    assert shed_for(b.submit(chat("r3", model="gpt"), 0.0)) == "no_replica"


def test_a_base_model_without_the_adapter_does_not_get_its_requests() -> None:
    b = balancer()
    b.fleet_event(Added("plain", models=frozenset({"llama"})), 0.0)
    assert shed_for(b.submit(chat("r1", model="llama", adapter="sql"), 0.0)) == "no_replica"
    b.fleet_event(Added("both", models=frozenset({"llama"}), adapters=frozenset({"sql"})), 0.0)
    assert [sent_to(b.submit(chat(f"a{i}", model="llama", adapter="sql"), 0.0)) for i in range(2)] == ["both", "both"]
    assert sent_to(b.submit(chat("r2", model="llama"), 0.0)) == "plain"
    b.fleet_event(Added("plain", models=frozenset({"llama"}), adapters=frozenset({"sql"})), 1.0)  # loaded at run time
    assert sent_to(b.submit(chat("r3", model="llama", adapter="sql"), 1.0)) == "plain"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_pinned_request_goes_to_its_replica_or_nowhere(name: str) -> None:
    """Whatever the policy prefers; a replica in panic mode is still the only one that can answer."""
    b = Balancer(DEFAULT_CLASSES, make(name, {}, random.Random(1)), Settings().without_science(), random.Random(1))
    for replica in ("a", "b", "c"):
        b.fleet_event(Added(replica), 0.0)
    text = {"text": lambda: "where is the river", "chain": (1, 2, 3), "prompt_bytes": 768}
    assert [sent_to(b.submit(chat(f"r{i}", pinned="c", **text), 0.0)) for i in range(3)] == ["c", "c", "c"]
    b.fleet_event(Ejected("c", "slow", statistical=True), 1.0)
    assert sent_to(b.submit(chat("r3", pinned="c", **text), 1.0)) == "c"
    b.fleet_event(Draining("c"), 2.0)
    assert shed_for(b.submit(chat("r4", pinned="c", **text), 2.0)) == "no_replica"
    assert shed_for(b.failed("r3", Outcome.ERROR, 2.0)) == "no_replica"
    b.fleet_event(Removed("c"), 3.0)
    assert shed_for(b.submit(chat("r5", pinned="c", **text), 3.0)) == "no_replica"


def test_a_pinned_request_is_held_for_its_replica_while_others_are_free() -> None:
    b = balancer("a", "b", settings=Settings(pacing=False, working_set=False))
    assert sent_to(b.submit(chat("r1", pinned="b", received_at=0.0, ttft_deadline=60.0), 0.0)) == "b"
    (decision,) = b.submit(chat("r2", pinned="b", received_at=0.0, ttft_deadline=60.0), 0.0)
    assert isinstance(decision, Hold)
    assert sent_to(b.first_token("r1", 1.0)) == "b"


def test_an_id_that_is_open_cannot_be_opened_again() -> None:
    b = balancer("a")
    b.submit(chat("r1"), 0.0)
    with pytest.raises(ValueError, match="'r1' is already open"):
        b.submit(chat("r1"), 0.0)


@pytest.mark.parametrize(("policy", "holds", "reads"), [("round_robin", False, False), ("round_robin", True, True)])
def test_a_rule_that_looks_at_nothing_needs_no_chain(policy: str, holds: bool, reads: bool) -> None:
    settings = Settings() if holds else Settings().without_science()
    balancer = Balancer(DEFAULT_CLASSES, make(policy), settings, random.Random(0))
    assert balancer.reads_prefix is reads
    balancer.use(make("forebay"), 0.0)
    assert balancer.reads_prefix


def test_settings_may_be_left_out_or_given_by_name() -> None:
    assert Balancer(DEFAULT_CLASSES, FewestOpen()).settings == Settings()
    assert Balancer(DEFAULT_CLASSES, FewestOpen(), {"pacing": False, "pace": 0.5, "max_held": 7}).settings == Settings(
        pacing=False, pace=0.5, max_held=7
    )


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"paceing": True}, "setting 'paceing' is not known; one of admission, "),
        ({"pacing": 1}, "setting 'pacing' is 1; true or false would be right"),
        ({"max_held": "many"}, "setting 'max_held' is 'many'; a number would be right"),
        ({"max_held": None}, "setting 'max_held' is None; a number would be right"),
    ],
)
def test_a_setting_that_cannot_be_is_named(settings: dict[str, object], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Balancer(DEFAULT_CLASSES, FewestOpen(), settings)


def test_alternatives_name_only_replicas_that_could_have_had_the_request() -> None:
    b = Balancer(DEFAULT_CLASSES, make("forebay", {}, random.Random(1)), Settings().without_science())
    for name in ("a", "b", "c"):
        b.fleet_event(Added(name), 0.0)
    request = Request("r", service_class="standard", prompt_tokens=1000)
    (first,) = b.submit(request, 0.0)
    assert isinstance(first, Dispatch)
    (second,) = b.failed("r", Outcome.ERROR, 0.1)
    assert isinstance(second, Dispatch)
    assert {x.replica_id for x in second.alternatives} == {"a", "b", "c"} - {first.replica_id, second.replica_id}


def test_a_policy_that_needs_nothing_is_decided_without_predictions() -> None:
    b = Balancer(
        DEFAULT_CLASSES, make("round_robin", None, random.Random(1)), Settings().without_science(), random.Random(1)
    )
    for name in ("a", "b"):
        b.fleet_event(Added(name, prefill_rate=1000.0, kv_capacity_tokens=100_000), 0.0)
    first, second = chat("r1", chain=(1, 2, 3), prompt_bytes=4000), chat("r2", chain=(1, 2, 3), prompt_bytes=4000)
    assert b.submit(first, 0.0) == [Dispatch("r1", "a", "turn")]
    assert b.submit(second, 0.0) == [Dispatch("r2", "b", "turn")]
    assert b.backlog_tokens("a", 0.0) == 1000.0  # all of the prompt: nobody asked what is cached
    b.first_token("r1", 3.0)  # a third of the rate: but nobody knows how much of it was computed
    assert b.snapshot()["replicas"]["a"]["prefill_rate"] == 1000.0
    assert b.snapshot()["margins"] == {}
    b.complete("r1", Outcome.SUCCESS, Usage(2000, 50, 0), 4.0)
    assert b.snapshot()["replicas"]["a"]["in_flight"] == 0
    assert b.prompt_tokens("", 4000) == 2000  # bytes per token are learnt all the same: objectives depend on them


def test_from_the_fast_lane_to_a_policy_that_predicts_and_back() -> None:
    b = Balancer(
        DEFAULT_CLASSES, make("least_request", None, random.Random(1)), Settings().without_science(), random.Random(1)
    )
    b.fleet_event(Added("a", prefill_rate=1000.0, kv_capacity_tokens=100_000), 0.0)
    b.submit(chat("r1"), 0.0)
    b.use(make("forebay", None, random.Random(1)), 0.5)
    (decision,) = b.submit(chat("r2", tokens=500), 0.5)
    assert isinstance(decision, Dispatch)
    assert decision.prediction is not None
    assert decision.prediction.uncached_tokens == 500
    assert b.backlog_tokens("a", 0.5) == 1000.0  # half of the first, and the second
    b.use(make("least_request", None, random.Random(1)), 0.6)
    for name in ("r1", "r2"):
        b.complete(name, Outcome.SUCCESS, Usage(1000, 5, 0), 2.0)
    assert b.snapshot()["replicas"]["a"]["in_flight"] == 0
    assert b.backlog_tokens("a", 2.0) == 0.0


def test_who_has_been_tried_is_hidden_from_that_request_only() -> None:
    b = Balancer(
        DEFAULT_CLASSES, make("least_request", None, random.Random(1)), Settings().without_science(), random.Random(1)
    )
    for name in ("a", "b"):
        b.fleet_event(Added(name, prefill_rate=1000.0), 0.0)
    (sent,) = b.submit(chat("r1"), 0.0)
    assert isinstance(sent, Dispatch)
    other = {"a": "b", "b": "a"}[sent.replica_id]
    assert sent_to(b.failed("r1", Outcome.ERROR, 0.1)) == other
    assert sent_to(b.submit(chat("r2"), 0.2)) == sent.replica_id  # the emptier one again
