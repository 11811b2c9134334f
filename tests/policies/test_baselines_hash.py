"""Baselines that hash: sessions, prefixes, bounded loads."""

from __future__ import annotations

from random import Random

from xxhash import xxh3_64_intdigest, xxh64_intdigest

from policies import make
from policies.chwbl import PointRing
from policies.model import Added, Removed
from policies.ring import Ring
from tests.policies.views import ask, chosen, fleet, sent, text


def ring(*names: str) -> Ring:
    made = Ring()
    for name in names:
        made.add(name)
    return made


def test_session_hash_follows_the_ring_when_the_home_is_down() -> None:
    policy = make("session_hash")
    for name in "abc":
        policy.observe(Added(name), 0.0)
    order = ring("a", "b", "c").preference("s1")
    assert chosen(policy, ask(session="s1"), fleet(a=0, b=0, c=0)) == order[0]
    down = fleet(**{name: {"available": name != order[0]} for name in "abc"})
    assert chosen(policy, ask(session="s1"), down) == order[1]


def test_session_hash_spreads_the_sessions_of_a_dead_replica_and_moves_no_others() -> None:
    policy = make("session_hash")
    view, less = fleet(a=0, b=0, c=0, d=0), fleet(a=0, b=0, c=0)
    before = {s: chosen(policy, ask(session=f"s{s}"), view) for s in range(200)}
    policy.observe(Removed("d"), 0.0)
    after = {s: chosen(policy, ask(session=f"s{s}"), less) for s in range(200)}
    assert all(after[s] == home for s, home in before.items() if home != "d")
    assert {after[s] for s, home in before.items() if home == "d"} == {"a", "b", "c"}


def test_without_a_session_both_hash_rules_draw_at_random() -> None:
    for name in ("session_hash", "rendezvous"):
        policy = make(name, rng=Random(1))
        assert {chosen(policy, ask(), fleet(a=0, b=0, c=0)) for _ in range(50)} == {"a", "b", "c"}


def test_rendezvous_takes_the_highest_hash_of_session_and_replica() -> None:
    wanted = max("abc", key=lambda name: xxh3_64_intdigest(f"s9:{name}".encode()))
    assert chosen(make("rendezvous"), ask(session="s9"), fleet(a=50, b=50, c=50)) == wanted


def walk(key: int, *names: str, points: int = 256) -> list[str]:
    order: list[str] = []
    for name in PointRing(points).walk(key, fleet(**dict.fromkeys(names, 0))):
        if name not in order:
            order.append(name)
    return order


def test_chwbl_is_kubeais_walk() -> None:
    key = xxh64_intdigest(("x" * 100).encode())
    first, second, third = walk(key, "a", "b", "c")
    policy = make("chwbl")
    request = text("x" * 100 + "anything after the first hundred characters")
    # total 0: the first point; else in_flight <= 1.25 (total + 1) / 3
    assert chosen(policy, request, fleet(a=0, b=0, c=0)) == first
    assert chosen(policy, request, fleet(**{first: 5, second: 4, third: 4})) == first  # 5 <= 5.83
    assert chosen(policy, request, fleet(**{first: 6, second: 3, third: 4})) == second  # 6 > 5.83
    assert chosen(policy, request, fleet(**{first: 10, second: 9, third: 0})) == third  # both above 8.33


def test_chwbl_keys_by_adapter_too_and_by_the_first_chunk_without_text() -> None:
    policy = make("chwbl")
    view = fleet(**{f"r{i}": 0 for i in range(16)})
    with_adapter = {chosen(policy, text("same prompt", adapter=f"lora{i}"), view) for i in range(30)}
    assert len(with_adapter) > 5
    assert chosen(policy, ask(chain=(7, 8)), view) == chosen(policy, ask(chain=(7, 9)), view)


def test_chwbl_work_measures_load_in_tokens() -> None:
    first, second = ring("a", "b").preference(xxh64_intdigest(("x" * 100).encode()))
    policy, request = make("chwbl_work"), text("x" * 200)

    def view(home_backlog: float, other_backlog: float) -> str | None:
        return chosen(
            policy,
            request,
            fleet(
                **{
                    first: {"prefill_backlog_tokens": home_backlog, "uncached_tokens": 1000.0, "in_flight": 99},
                    second: {"prefill_backlog_tokens": other_backlog, "uncached_tokens": 1000.0},
                }
            ),
        )

    assert view(0.0, 0.0) == first
    assert view(3000.0, 3000.0) == first  # 3000 <= 1.25 x 7000 / 2
    assert view(9000.0, 1000.0) == second  # 9000 > 1.25 x 11000 / 2


def test_prefix_hash_256_leaves_a_loaded_home_for_the_least_loaded_not_the_next() -> None:
    key = xxh64_intdigest(("y" * 1024).encode())
    first, second, third = walk(key, "a", "b", "c", points=150)
    policy, request = make("prefix_hash_256"), text("y" * 3000)
    assert chosen(policy, request, fleet(**{first: 5, second: 4, third: 4})) == first
    assert chosen(policy, request, fleet(**{first: 9, second: 3, third: 2})) == third


def test_sticky_table_keeps_sessions_unless_overloaded_and_cheap_to_move() -> None:
    policy = make("sticky_table")
    light = ask(session="s", prompt_bytes=32 * 1024)
    heavy = ask(session="s", prompt_bytes=32 * 1024 + 1)
    sent(policy, light, "a")
    assert chosen(policy, light, fleet(a=9, b=2)) == "a"  # 9 - 2 < 8
    assert chosen(policy, light, fleet(a=16, b=9)) == "a"  # 16 - 9 < 8
    assert chosen(policy, light, fleet(a=17, b=9)) == "a"  # 17 < 2 x 9
    assert chosen(policy, light, fleet(a=18, b=9)) == "b"
    assert chosen(policy, heavy, fleet(a=18, b=9)) == "a"  # too large to rebuild elsewhere
    assert chosen(policy, light, fleet(a=1, b=0), now=1801.0) == "b"  # forgotten


def test_sticky_table_places_new_sessions_by_load_then_by_residents() -> None:
    policy = make("sticky_table")
    sent(policy, ask(session="s"), "a")
    assert chosen(policy, ask(session="t"), fleet(a=1, b=1)) == "b"
    assert chosen(policy, ask(session="t"), fleet(a=0, b=1)) == "a"
    policy.observe(Removed("a"), 0.0)
    assert chosen(policy, ask(session="s"), fleet(b=3)) == "b"
