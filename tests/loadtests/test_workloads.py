"""The built-in workloads: the same bytes everywhere, and the shapes their names promise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from loadtests.reuse import ceiling
from loadtests.schedule import Schedule
from loadtests.workloads import CLASSES, WORKLOADS

PINNED: dict[str, str] = {
    "chat": "539b29c6e832945f",
    "coding": "b15b90512e07a164",
    "rag": "9d2ea4fa7c040510",
    "siblings": "974e2023dab45fde",
    "unique": "e228074e3590d9f5",
    "hot-prefix": "088da601e97332e4",
    "mixed": "c64532ff067e08f8",
    "half-batch": "bed31eabfa798059",
    "batch-alone": "1a93453ca2f903a7",
    "lora": "bbe181a4d12bd441",
    "tenants": "a5faf76860d5a584",
    "tenants-alone": "bfa834e90238cfd5",
    "diurnal": "8bd521b7896b390c",
    "bursty": "1dc270fb743ab6a9",
}


def made(name: str, seed: int = 1, load: float = 1.0, window_s: float = 60.0) -> Schedule:
    return WORKLOADS[name].cut(seed, load, window_s, 20.0, CLASSES)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_bytes_of_a_workload_are_pinned(name: str) -> None:
    assert made(name).sha256[:16] == PINNED[name]


def test_another_process_with_another_hash_seed_makes_the_same_bytes() -> None:
    code = (
        "from loadtests.workloads import CLASSES, WORKLOADS;"
        "print(WORKLOADS['chat'].cut(1, 1.0, 60.0, 20.0, CLASSES).sha256[:16])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "12345"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == PINNED["chat"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_seeds_differ_and_lengths_stay_within_what_the_drain_was_made_for(name: str) -> None:
    one, other = made(name, 1), made(name, 2)
    assert one.sha256 != other.sha256
    for service_class, prompt, output in WORKLOADS[name].longest:
        of_class = [r for r in one.rows if r.service_class == service_class]
        assert of_class
        assert max(r.prompt_tokens for r in of_class) <= prompt
        assert max(r.output_tokens for r in of_class) <= output


def test_a_double_load_is_a_double_rate() -> None:
    one, double = (len(made("unique", 3, load, 200.0).cohort) for load in (1.0, 2.0))
    assert double / one == pytest.approx(2.0, rel=0.08)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("chat", 0.45, 0.85), ("coding", 0.80, 0.99), ("rag", 0.15, 0.60), ("siblings", 0.80, 0.90),
        ("unique", 0.0, 0.0), ("hot-prefix", 0.80, 0.97), ("lora", 0.20, 0.60), ("bursty", 0.0, 0.0),
    ],
)  # fmt: skip
def test_what_can_be_reused_is_known_for_each_workload(name: str, low: float, high: float) -> None:
    plan = made(name, window_s=200.0)
    found = ceiling(plan.rows, plan.block_tokens)
    assert found is not None
    assert low <= found <= high


def test_siblings_come_eight_at_once_with_one_prompt() -> None:
    rows = made("siblings").rows
    first = [r for r in rows if r.at_s == rows[0].at_s]
    assert len(first) == 8
    assert len({r.blocks for r in first}) == 1


def test_conversations_are_closed_loop_and_extend_themselves() -> None:
    plan = made("chat", window_s=120.0)
    turns = next(t for t in plan.sessions.values() if len(t) >= 3)
    assert [t.at_s is None for t in turns] == [False] + [True] * (len(turns) - 1)
    full = turns[0].prompt_tokens // plan.block_tokens
    assert turns[1].blocks[:full] == turns[0].blocks[:full]
    assert turns[1].prompt_tokens > turns[0].prompt_tokens + turns[0].output_tokens
    assert all(t.think_s > 0.0 for t in turns[1:])


def test_mixed_traffic_has_both_classes() -> None:
    assert {r.service_class for r in made("mixed").rows} == {"interactive", "batch"}


def test_adapters_share_nothing_across() -> None:
    plan = made("lora")
    first_block = {r.adapter: r.blocks[0] for r in plan.rows}
    assert len(set(first_block.values())) == len(first_block) > 5


def test_bursts_are_four_times_the_base_rate() -> None:
    rows = made("bursty", window_s=600.0).cohort
    on = sum((r.at_s or 0.0) % 120.0 >= 90.0 for r in rows) / (600.0 / 4)
    off = sum((r.at_s or 0.0) % 120.0 < 90.0 for r in rows) / (600.0 * 3 / 4)
    assert on / off == pytest.approx(4.0, rel=0.2)


def test_the_day_swings_between_a_fifth_and_the_whole() -> None:
    rows = made("diurnal", window_s=1200.0).cohort
    low = sum((r.at_s or 0.0) < 120.0 for r in rows)
    high = sum(540.0 <= (r.at_s or 0.0) < 660.0 for r in rows)
    assert high / low == pytest.approx(5.0, rel=0.3)


def test_every_workload_says_what_it_is() -> None:
    assert all(len(g.about) > 40 for g in WORKLOADS.values())


def test_the_quiet_tenants_send_the_same_whether_somebody_floods_or_not() -> None:
    quiet = [(r.at_s, r.tenant, r.prompt_tokens, r.blocks) for r in made("tenants-alone").cohort]
    rows = [(r.at_s, r.tenant, r.prompt_tokens, r.blocks) for r in made("tenants").cohort]
    assert quiet == [row for row in rows if row[1] != "tenant-9"]
    flood = len(rows) - len(quiet)
    assert flood / (len(quiet) / 9) == pytest.approx(20.0, rel=0.25)


def test_half_of_the_tokens_of_half_batch_are_batch_and_are_those_of_batch_alone() -> None:
    def rows(name: str) -> list[tuple[int, int]]:
        plan = made(name, window_s=200.0)
        return [(r.prompt_tokens, r.output_tokens) for r in plan.rows if r.service_class == "batch"]

    both = made("half-batch", window_s=200.0)
    everything = sum(r.prompt_tokens + r.output_tokens for r in both.rows)
    assert rows("half-batch") == rows("batch-alone")
    assert 0.45 < sum(p + o for p, o in rows("half-batch")) / everything < 0.55
