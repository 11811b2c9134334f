"""A core that follows another goes on with what that one had learnt, until it learns better."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from policies import registry
from policies.core import Balancer
from policies.learnt import learnt, recall
from policies.model import Added, Dispatch, Outcome, Pulse, Request, ServiceClass, Usage


def core() -> Balancer:
    made = Balancer([ServiceClass("standard")], registry.make("forebay"), None, random.Random(0))
    for replica in ("r0", "r1"):
        made.fleet_event(Added(replica, kv_capacity_tokens=1_000_000), 0.0)
    return made


def served(made: Balancer, requests: int, tokens_per_s: float, start: float = 0.0) -> None:
    """One after the other, prompts of 2,000 to 9,000 tokens of five bytes each."""
    now = start
    for i in range(requests):
        tokens = 2000 + 1000 * (i % 8)
        request = Request(f"q{start}-{i}", "m", received_at=now, prompt_tokens=tokens, prompt_bytes=5 * tokens)
        (sent,) = made.submit(request, now)
        assert isinstance(sent, Dispatch)
        now += 0.03 + tokens / tokens_per_s
        made.first_token(request.id, now)
        made.pulse(sent.replica_id, Pulse(1, 0, None, 10, 0.2, 10, 0.9), now)
        made.complete(request.id, Outcome.SUCCESS, Usage(tokens, 20, 0), now + 0.1)
        now += 0.2


def through_json(said: dict[str, Any]) -> dict[str, Any]:
    """As it crosses a link."""
    kept: dict[str, Any] = json.loads(json.dumps(said))
    return kept


def predicted_s(made: Balancer, now: float) -> float:
    (sent,) = made.submit(Request("asked", "m", received_at=now, prompt_tokens=8000, prompt_bytes=40_000), now)
    assert isinstance(sent, Dispatch)
    assert sent.prediction is not None
    made.cancel("asked", now)
    return sent.prediction.ttft_s


def test_the_next_core_predicts_as_the_one_before_did() -> None:
    before, after, fresh = core(), core(), core()
    served(before, 60, 20_000.0)
    recall(after.dispatcher, through_json(learnt(before.dispatcher)))
    expected = predicted_s(before, 1000.0)
    assert expected == pytest.approx(0.43, rel=0.1)
    assert predicted_s(after, 1000.0) == pytest.approx(expected, rel=0.05)
    assert predicted_s(fresh, 1000.0) > 2.0 * expected, "what it would be without"
    assert after.prompt_tokens("m", 5000) == before.prompt_tokens("m", 5000) == 1000
    assert after.snapshot()["margins"] == before.snapshot()["margins"]
    one, other = (made.fleet.replicas["r0"].decode for made in (before, after))
    assert (other.idle_s, other.busy_s) == (one.idle_s, one.busy_s)


def test_it_learns_on_from_there() -> None:
    before, after = core(), core()
    served(before, 60, 20_000.0)
    recall(after.dispatcher, through_json(learnt(before.dispatcher)))
    served(after, 60, 8000.0, start=2000.0)
    assert predicted_s(after, 3000.0) == pytest.approx(1.03, rel=0.1)


def test_a_core_that_has_learnt_nothing_teaches_nothing_and_what_is_gone_is_left_out() -> None:
    empty, after = core(), core()
    said = through_json(learnt(empty.dispatcher))
    assert said == {"fleet": None, "replicas": {}, "bytes_per_token": {}, "margins": {}}
    recall(after.dispatcher, said)
    assert predicted_s(after, 1.0) == predicted_s(empty, 1.0)
    recall(after.dispatcher, said | {"replicas": {"gone": [[0.1, 0.1, 0.0, 10.0], None, None]}})
    assert sorted(after.fleet.replicas) == ["r0", "r1"]


def test_a_replica_that_has_shown_nothing_starts_from_what_the_fleet_has() -> None:
    before, after = core(), core()
    served(before, 60, 20_000.0)
    said = through_json(learnt(before.dispatcher))
    known = said["replicas"].pop("r1")
    recall(after.dispatcher, said)
    r1 = after.fleet.replicas["r1"].prefill
    assert r1.believes() == tuple(said["fleet"])
    assert r1.rate == pytest.approx(known[0][3], rel=0.2)
    hinted = core()
    hinted.fleet_event(Added("quick", prefill_rate=50_000.0), 0.0)
    recall(hinted.dispatcher, said)
    assert hinted.fleet.replicas["quick"].prefill.rate == 50_000.0, "somebody who knows it said so"
