"""Arithmetic of the bars."""

from __future__ import annotations

import json

from loadtests.bench import cost, load
from loadtests.bench.__main__ import show
from loadtests.bench.cost import Bar, Measured


def results(ours: list[float], theirs: list[float], errors: int = 0) -> cost.Results:
    per_s = [1.0] * len(ours)
    mine = Measured(us=ours, per_s=per_s, errors=errors, first_error="HTTP/1.1 503" if errors else "")
    return {"short request": {cost.SIMPLE: mine, cost.ROUND_ROBIN: Measured(us=theirs, per_s=per_s)}}


def test_a_ratio_compares_the_same_round() -> None:
    bar = Bar("short request", cost.SIMPLE, cost.ROUND_ROBIN, 0.9)
    assert cost.ratios(results([40.0, 90.0], [80.0, 100.0]), bar) == [0.5, 0.9]


def test_a_bar_that_was_not_measured_has_no_ratio() -> None:
    assert cost.ratios(results([1.0], [1.0]), Bar("32 KB prompt", cost.SIMPLE, cost.ROUND_ROBIN, 0.9)) == []


def test_the_verdict_is_the_median_round_and_errors_spoil_it() -> None:
    assert show(results([80.0, 95.0, 90.0], [100.0, 100.0, 100.0]))
    assert not show(results([80.0, 95.0, 91.0], [100.0, 100.0, 100.0]))
    assert not show(results([50.0], [100.0], errors=1))


def test_bodies_have_the_size_and_the_number_they_should() -> None:
    body = load.chat_body(32 * 1024, turns=16, max_tokens=2, stream=True)
    asked = json.loads(body)
    assert sum(len(m["content"]) for m in asked["messages"]) == 32 * 1024
    assert [m["role"] for m in asked["messages"][:3]] == ["system", "user", "assistant"]
    assert asked["messages"][-1]["content"].endswith(load.NUMBER)
    assert asked["stream"] is True
    assert body.count(load.NUMBER.encode()) == 1
