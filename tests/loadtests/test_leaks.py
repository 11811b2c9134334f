"""Fifty families, eight leaks: the report finds each, at its place, with its loss; in clean traffic it finds none."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from functools import cache
from typing import Any

import pytest

from loadtests import leaks
from policies import prefix
from policies.canonical import canonical_parts
from policies.families import Families, Sample
from policies.phrases import phrases
from policies.places import path
from policies.prefix_report import report

REQUESTS = 3_000
BYTES_PER_TOKEN = 4


@cache
def judged(seed: int, leaky: bool) -> tuple[dict[str, Any], dict[str, float], dict[str, leaks.Planted]]:
    """The report after an hour, and the tokens truly lost and the planted leak by kind."""
    families = Families(random.Random(seed))
    made = leaks.families(seed, leaky)
    planted = {family.number: p for family in made if (p := family.planted()) is not None}
    lost: Counter[str] = Counter()
    earlier: defaultdict[int, list[bytes]] = defaultdict(list)
    for one in leaks.traffic(made, REQUESTS, seed):
        parts = canonical_parts(one.api, one.body)
        stream = b"".join(parts)
        tokens = len(stream) // BYTES_PER_TOKEN
        if one.family in planted:
            shared = stream[: stream.index(b"user\xffR")]
            lost[planted[one.family].kind] += leaks.lost_bytes(planted[one.family], shared, earlier[one.family])
        arrival = families.arrived(prefix.chain(parts), len(stream), tokens)
        if arrival.wanted:
            sample = Sample(
                phrases(parts, one.body, seed=7), 7, "sim", None, arrival.known_bytes, tokens / len(stream),
                text=lambda start, size, stream=stream: stream[start : start + size],
                path=lambda field, tool, one=one, parts=parts: path(one.api, one.body, parts, field, tool),
                salted=lambda field: False,
            )  # fmt: skip
            family, rows = families.judge(sample, arrival.stratum.take(), one.at_s)
            arrival.stratum.leaky |= bool(rows)
            families.counted(family, one.at_s, 1, tokens, tokens, 0, 0, arrival.cacheable_tokens)
    told = report(families, leaks.SPAN_S)
    by_kind = {kind: n / BYTES_PER_TOKEN for kind, n in lost.items()}
    return told, by_kind, {p.kind: p for p in planted.values()}


@pytest.mark.parametrize("seed", [1, 2])
def test_each_planted_leak_is_found_where_it_is_and_costs_what_it_costs(seed: int) -> None:
    told, lost, planted = judged(seed, leaky=True)
    assert len(told["families"]) == 50
    assert Counter(row["kind"] for row in told["leaks"]) == Counter(
        ["timestamp", "uuid", "user_name", "tool_order", "tool_keys", "example_order", "counter", "nonce"]
    )
    for row in told["leaks"]:
        assert row["path"] == planted[row["kind"]].path
        assert row["lost_tokens_per_hour"] == pytest.approx(lost[row["kind"]], rel=0.2)


def test_the_costliest_leak_is_first() -> None:
    told, lost, _ = judged(1, leaky=True)
    assert [row["kind"] for row in told["leaks"]] == [
        "tool_keys", "example_order", "tool_order", "user_name", "timestamp", "counter", "uuid", "nonce",
    ]  # fmt: skip
    assert {kind: round(tokens) for kind, tokens in lost.items()} == {
        "tool_keys": 172603, "example_order": 163372, "tool_order": 85728, "user_name": 57862,
        "timestamp": 40677, "counter": 31826, "uuid": 28814, "nonce": 14020,
    }  # fmt: skip
    ranked = [row["lost_tokens_per_hour"] for row in told["leaks"]]
    assert ranked == sorted(ranked, reverse=True)


def test_clean_traffic_has_no_leak() -> None:
    told, _, _ = judged(1, leaky=False)
    assert len(told["families"]) == 50
    assert told["leaks"] == []


def test_a_value_is_found_to_the_byte() -> None:
    made = leaks.families(1, leaky=True)
    family = next(f for f in made if f.leak == "uuid")
    told, _, _ = judged(1, leaky=True)
    (row,) = [row for row in told["leaks"] if row["kind"] == "uuid"]
    assert row["offset"] == len(family.before) + len("Trace ")
