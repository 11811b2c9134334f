"""Each model's replicas have a price of their own: what others are asked for is none of theirs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from policies.core import Balancer
from policies.model import Added, Decision, Dispatch, Outcome, Request, ServiceClass, Shed
from policies.registry import make
from policies.settings import Settings
from tests.policies.play import Play

MODELS = ("gemma", "llama", "mistral", "qwen")
PREFILL_S = 0.4


def fleet(*models: str, adapters: frozenset[str] = frozenset()) -> Balancer:
    """Two replicas for each; the first of each serves the adapters too."""
    made = Balancer((ServiceClass("chat"),), make("forebay"), Settings(), random.Random(1))
    for model in models:
        made.fleet_event(Added(f"{model}-a", models=frozenset({model}), adapters=adapters), 0.0)
        made.fleet_event(Added(f"{model}-b", models=frozenset({model})), 0.0)
    return made


def chat(name: str, model: str, now: float, adapter: str | None = None) -> Request:
    return Request(
        name,
        model=model,
        adapter=adapter,
        service_class="chat",
        received_at=now,
        ttft_deadline=now + 10.0,
        prompt_tokens=2000,
    )


def refused(b: Balancer, offered: list[tuple[float, str]]) -> Counter[str]:
    """By model. offered: when, and for which model; replicas prefill one prompt after the other, 0.4 s each."""
    free_at: dict[str, float] = {}
    out = Counter[str]()

    def each(decision: Decision, now: float) -> None:
        if isinstance(decision, Dispatch):
            name = decision.request_id
            at = free_at[decision.replica_id] = max(now, free_at.get(decision.replica_id, 0.0)) + PREFILL_S
            play.at(at + 0.05, lambda now: play.follow(b.first_token(name, now), now))
            play.at(at + 0.55, lambda now: play.follow(b.complete(name, Outcome.SUCCESS, None, now), now))
        elif isinstance(decision, Shed):
            out[decision.request_id.split()[1]] += 1

    def arrive(name: str, model: str) -> Callable[[float], None]:
        return lambda now: play.follow(b.submit(chat(name, model, now), now), now)

    play = Play(b, each)
    for n, (at, model) in enumerate(offered):
        play.at(at, arrive(f"{n} {model}", model))
    play.run()
    return out


def poisson(model: str, per_s: float, seconds: float, rng: random.Random) -> list[tuple[float, str]]:
    at, out = 0.0, []
    while (at := at + rng.expovariate(per_s)) < seconds:
        out.append((at, model))
    return out


def test_four_models_at_two_thirds_of_what_each_can_serve_refuse_nobody() -> None:
    """With one price for all, what four were asked for stood against the capacity of one: half was refused."""
    rng = random.Random(2)
    offered = [row for model in MODELS for row in poisson(model, 0.66 * 2 / PREFILL_S, 60.0, rng)]
    assert not refused(fleet(*MODELS), offered)


def test_the_overload_of_one_model_costs_the_others_nothing() -> None:
    rng = random.Random(2)
    offered = poisson("llama", 15.0, 60.0, rng) + poisson("qwen", 3.0, 60.0, rng)  # three times what two can, and 0.6
    out = refused(fleet("llama", "qwen"), offered)
    assert out["qwen"] == 0
    assert 500 < out["llama"] < 640  # of about 900, 300 of which can be served


def test_who_asks_for_an_adapter_competes_with_all_who_ask_for_its_model() -> None:
    b = fleet("llama", adapters=frozenset({"legal"}))
    for n in range(40):
        b.submit(chat(f"{n}", "llama", n / 10, "legal" if n % 2 else None), n / 10)
    assert list(b.binding.prices.by_group) == ["llama"]
    pool = b.fleet.pool(chat("x", "llama", 4.0, "legal"))
    assert ([r.id for r in pool.open], [r.id for r in pool.whole.open]) == (["llama-a"], ["llama-a", "llama-b"])


def test_replicas_that_serve_any_model_have_one_price() -> None:
    b = Balancer((ServiceClass("chat"),), make("forebay"), Settings(), random.Random(1))
    b.fleet_event(Added("a"), 0.0)
    b.submit(chat("1", "llama", 0.0), 0.0)
    b.submit(chat("2", "qwen", 0.0), 0.0)
    assert list(b.binding.prices.by_group) == [""]
    assert b.snapshot()["price_s"] == {"": [None, None, None, None]}


def test_other_gateways_hear_of_each_model_apart() -> None:
    a, b = fleet("llama", "qwen"), fleet("llama", "qwen")
    a.overloaded_elsewhere("b", b.overload(), 0.0)
    for n in range(60):
        b.submit(chat(f"{n}", "llama", 1.0), 1.0)
    a.overloaded_elsewhere("b", b.overload(), 1.1)
    waiting = {group: a.binding.told.waiting(group) for group in ("llama", "qwen")}
    assert waiting["llama"] > 5.0  # tens of prompts of a quarter of a second, as is believed at first
    assert waiting["qwen"] == 0.0
    asked = {group: price._asked[0] for group, price in a.binding.prices.by_group.items()}
    assert asked.get("qwen", 0.0) == 0.0
    assert asked["llama"] == 2000.0 * len([1 for row in b.binding.told._asked if row[2] == "llama"])
