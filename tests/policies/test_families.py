"""Stories of prompt families: what is one, what is a leak, and what only looks like one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from policies import prefix
from policies.canonical import KINDS, canonical_parts
from policies.families import Families, Sample
from policies.flow import Flow
from policies.phrases import phrases
from policies.places import path
from policies.prefix_report import report
from policies.seen import Seen
from policies.strata import MOST_NODES, Strata

RULES = "\n".join(f"Rule {n}: be brief about river {n}, and cite what you know of it." for n in range(40))
OTHER = RULES.replace("Rule", "Clause").replace("river", "mountain").replace("brief", "thorough")
SAFETY = "\n".join(f"Never do harm number {n}, whatever you are told by anyone." for n in range(12))


class Gateway:
    """Every request is looked at; a request a second; 4 bytes to the token."""

    def __init__(self, most: int = 200) -> None:
        self.families = Families(random.Random(1), most)
        self.now = 0.0

    def asks(self, system: str, *turns: str, **more: Any) -> int:
        """Answers how many tokens one endless cache would have had."""
        roles = ("user", "assistant")
        said = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
        body = {"model": "m", "messages": [{"role": "system", "content": system}, *said], **more}
        parts = canonical_parts("chat", body)
        stream = b"".join(parts)
        self.now += 1.0
        arrival = self.families.arrived(prefix.chain(parts), len(stream), len(stream) // 4)
        sample = Sample(
            phrases(parts, body, 9), 9, "m", None, arrival.known_bytes, 0.25,
            text=lambda start, size: stream[start : start + size],
            path=lambda field, tool: path("chat", body, parts, field, tool),
            salted=lambda field: KINDS[parts[2 * field + 1][1]] == "cache_salt",
        )  # fmt: skip
        family, _ = self.families.judge(sample, arrival.stratum.take(), self.now)
        self.families.counted(family, self.now, 1, len(stream) / 4, len(stream) / 4, 0, 0, arrival.cacheable_tokens)
        return arrival.cacheable_tokens

    def report(self) -> dict[str, Any]:
        return report(self.families, self.now)

    def leaks(self) -> list[tuple[str, str]]:
        return [(row["kind"], row["path"]) for row in self.report()["leaks"]]


def test_two_applications_that_share_a_preamble_are_two_families() -> None:
    g = Gateway()
    for n in range(12):
        g.asks(f"{SAFETY}\n{RULES}", f"question {n}")
        g.asks(f"{SAFETY}\n{OTHER}", f"order {n * n}")
    assert len(g.report()["families"]) == 2
    assert g.leaks() == []


def test_a_conversation_that_grows_is_no_leak_and_is_cacheable() -> None:
    g = Gateway()
    turns: list[str] = []
    known = 0
    for n in range(8):
        turns += [f"What about the {n}th stone? " * 20]
        known = g.asks(RULES, *turns)
        turns += [f"It lies in bed {n} of the stream. " * 20]
    assert g.leaks() == []
    assert known > 2_500


def test_a_time_in_the_system_prompt_costs_the_whole_conversation() -> None:
    g = Gateway()
    turns: list[str] = []
    for n in range(10):
        turns += [f"What about the {n}th stone of {n * n}?\n" * 20]
        g.asks(f"It is 10:{n:02}:07.\n{RULES}", *turns)
        turns += [f"It lies in bed {n} of {n + 7} beds.\n" * 20]
    (row,) = g.report()["leaks"]
    assert (row["kind"], row["path"], row["offset"]) == ("timestamp", "messages[0].content", 6)
    assert row["lost_tokens_per_request"] > 2 * len(RULES) / 4


def test_a_leak_is_told_at_its_rate_from_the_first_minute_on_and_when_it_comes_later() -> None:
    g = Gateway()
    for n in range(10):
        g.asks(f"It is 10:{n:02}:07.\n{RULES}", f"question {n}")
    assert g.report()["leaks"][0]["requests_per_hour"] == pytest.approx(3600, rel=0.01)
    for n in range(300):
        g.asks(OTHER, f"order {n}")
    assert len(g.leaks()) == 1
    for n in range(10):
        g.asks(f"{OTHER}\nTrace {n:08x}-0b3f-4c1e-9a2b-7f5e3d1c0{n:03x}\n{SAFETY}\n{SAFETY[::-1]}", f"order {n}")
    assert [round(row["lost_error"], 3) for row in g.report()["leaks"]] == [0.0] * len(g.leaks())


def test_a_user_who_comes_back_has_lost_nothing() -> None:
    g = Gateway()
    names = ("Anna Berg", "Omar Haddad", "Mei Ito")
    for n in range(40):
        g.asks(f"You are helping {names[n % 3]} today.\n{RULES}", f"question {n}")
    lost = sum(row["lost_tokens_per_hour"] for row in g.report()["leaks"])
    assert lost <= 3 * len(RULES) / 4 * 3600 / 40


def test_retrieved_documents_are_no_leak() -> None:
    rng = random.Random(4)
    documents = ["\n".join(f"Fact {d}.{n} of {d * n}: the river runs on." for n in range(30)) for d in range(40)]
    g = Gateway()
    for n in range(60):
        g.asks(RULES, "\n".join(rng.sample(documents, 3)), f"question {n}")
    assert g.leaks() == []


def test_a_text_that_differs_in_front_of_what_all_share_is_told_as_text() -> None:
    rng = random.Random(5)
    g = Gateway()
    for _ in range(20):
        asked = " ".join("".join(rng.choices("abcdefg", k=5)) for _ in range(60))
        g.asks(f"{asked}.\n{RULES}", "go")
    assert g.leaks() == [("text", "messages[0].content")]


def test_a_salt_for_each_request_is_told_as_what_it_is() -> None:
    g = Gateway()
    for n in range(12):
        g.asks(RULES, f"question {n}", cache_salt=f"tenant-{n}")
    assert g.leaks() == [("cache_salt", "cache_salt")]


def test_a_small_loss_is_not_worth_telling() -> None:
    g = Gateway()
    for n in range(20):
        g.asks(f"{RULES}\nIt is 10:{n:02}:07.\n{'Answer in one line, please. ' * 4}", f"question {n}")
    assert g.leaks() == []


@pytest.mark.parametrize("most", [3, 20])
def test_families_are_bounded_whoever_sends_what(most: int) -> None:
    g = Gateway(most)
    rng = random.Random(6)
    for _ in range(200):
        words = " ".join("".join(rng.choices("abcdefgh", k=6)) for _ in range(80))
        g.asks(words + ".\n", "x")
        g.asks(words + ".\n", "y")
    assert len(g.families.families) <= 2 * most + 1
    known = {family.id for family in g.families.families.values()}
    assert {family.id for listed in g.families._of_phrase.values() for family in listed} <= known


def test_an_hour_fades_and_a_steady_rate_is_read_off_before_it_is_over() -> None:
    flow = Flow(1, 0.0)
    for second in range(600):
        flow.add(float(second), 2.0)
    assert flow.per_hour(600.0)[0] == pytest.approx(7200, rel=0.01)
    assert flow.per_hour(600.0 + 36_000.0)[0] < 1.0


def test_seen_keeps_what_is_used_and_forgets_the_rest() -> None:
    seen = Seen(100)
    often = tuple(range(10))
    assert seen.visit(often) == 0
    for n in range(50):
        assert seen.visit((1_000 + n, 2_000 + n)) == 0
        assert seen.visit(often) == 10
    assert seen.visit((1_000, 2_000)) == 0
    assert len(seen) <= 110


def test_strata_follow_what_is_frequent_and_stay_bounded() -> None:
    strata = Strata(random.Random(1))
    chain = (1, 2, 3, 4, 5)
    for _ in range(10):
        found = strata.of(chain, 4)
    assert found is not strata.rare
    assert strata.of((1, 2, 9, 9, 9), 2) is not found
    assert strata.of((7, 8), 0) is strata.rare
    rng = random.Random(2)
    for _ in range(20_000):
        strata.of((rng.getrandbits(64),), 1)
    assert len(strata) <= MOST_NODES
