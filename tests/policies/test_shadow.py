"""Shadow policies: asked, compared, and without any influence on what happens."""

from __future__ import annotations

import random

from policies.core import Balancer
from policies.model import Added, Choice, Dispatch, FleetView, Outcome, PolicyEvent, Request, Usage
from policies.policy import RoutingPolicy
from policies.registry import make
from policies.settings import Settings
from policies.shadow import Shadowing, Tally

BARE = Settings().without_science()


class Fixed:
    """Always the same replica; remembers what it was asked and told."""

    name = "fixed"

    def __init__(self, replica_id: str | None) -> None:
        self.replica_id = replica_id
        self.asked = 0
        self.heard: list[str] = []

    def choose(self, request: Request, fleet: FleetView, now: float) -> Choice:
        self.asked += 1
        return Choice(self.replica_id)

    def observe(self, event: PolicyEvent, now: float) -> None:
        self.heard.append(type(event).__name__)


def core(
    shadows: dict[str, Fixed], share: float, acting: RoutingPolicy | None = None
) -> tuple[Balancer, dict[str, Tally]]:
    tallies = {name: Tally() for name in shadows}
    policy = Shadowing(acting or make("least_work", None, random.Random(1)), shadows, share, tallies)
    balancer = Balancer([], policy, BARE, random.Random(0))
    for name in ("a", "b"):
        balancer.fleet_event(Added(name, prefill_rate=1000.0), 0.0)
    return balancer, tallies


def sent(balancer: Balancer, request: Request, now: float) -> str:
    (decision,) = balancer.submit(request, now)
    assert isinstance(decision, Dispatch)
    return decision.replica_id


def test_a_shadow_is_compared_by_tokens_and_predicted_delay_and_never_followed() -> None:
    balancer, tallies = core({"same": Fixed("a"), "other": Fixed("b")}, 1.0, Fixed("a"))
    chain = tuple(range(1, 17))  # 16 chunks, 4 KiB, 1,024 tokens
    for i in range(2):
        request = Request(f"{i}", session="s", prompt_tokens=1024, prompt_bytes=4096, chain=chain)
        assert sent(balancer, request, 2.0 * i) == "a"
        balancer.first_token(f"{i}", 2.0 * i + 1.0)
        balancer.complete(f"{i}", Outcome.SUCCESS, Usage(1024, 5, None), 2.0 * i + 1.1)
    same, other = request.shadows
    assert (same.agrees, same.uncached_tokens, same.ttft_s) == (True, 0, 0.0)
    assert (other.policy, other.replica_id, other.agrees) == ("other", "b", False)
    assert 900 <= other.uncached_tokens <= 1024  # it would have read again what a has cached
    assert other.ttft_s > 0.8
    assert (tallies["other"].asked, tallies["same"].agreed) == (2, 2)
    assert tallies["other"].more_tokens == other.uncached_tokens


def test_nothing_that_is_decided_depends_on_shadows() -> None:
    def trail(share: float) -> list[str]:
        balancer, _ = core({"other": Fixed("a"), "more": Fixed("b")}, share)
        out = []
        for i in range(40):
            session = f"s{i % 7}"
            request = Request(
                f"{i}", session=session, prompt_tokens=500 + 100 * (i % 5), prompt_bytes=2000, chain=(i % 7,)
            )
            out.append(sent(balancer, request, i * 0.1))
            if i % 3 == 0:
                balancer.first_token(f"{i}", i * 0.1 + 0.05)
                balancer.complete(f"{i}", Outcome.SUCCESS, None, i * 0.1 + 0.06)
        return out

    assert trail(1.0) == trail(0.0)


def test_the_share_is_of_sessions_and_bounds_events_too() -> None:
    shadow = Fixed("a")
    balancer, tallies = core({"other": shadow}, 0.25)
    asked = set()
    for i in range(400):
        request = Request(f"{i}", session=f"s{i % 200}", prompt_tokens=100, prompt_bytes=400)
        sent(balancer, request, float(i))
        if request.shadows:
            asked.add(request.session)
        balancer.complete(f"{i}", Outcome.SUCCESS, None, i + 0.5)
    assert 30 <= len(asked) <= 70
    assert tallies["other"].asked == 2 * len(asked)  # each session whole
    assert shadow.heard.count("Dispatched") == tallies["other"].asked
    assert shadow.heard.count("Completed") == tallies["other"].asked
    assert shadow.heard.count("Added") == 2


def test_a_shadow_without_an_answer_is_not_compared() -> None:
    balancer, tallies = core({"other": Fixed(None)}, 1.0)
    request = Request("1", session="s", prompt_tokens=100, prompt_bytes=400)
    assert sent(balancer, request, 0.0) in ("a", "b")
    assert request.shadows == ()
    assert tallies["other"].asked == 0


def test_it_is_blind_only_when_all_are() -> None:
    spread = make("round_robin", None, random.Random(0))
    assert Shadowing(spread, {"x": make("least_request", None, random.Random(0))}, 0.1, {}).blind
    assert not Shadowing(spread, {"x": make("least_work", None, random.Random(0))}, 0.1, {}).blind
