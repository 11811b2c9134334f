"""Phrases: the same sentence is the same phrase wherever it stands."""

from __future__ import annotations

import random
from typing import Any

from policies.canonical import canonical_parts
from policies.phrases import MOST_PHRASES, Phrases, phrases

SEED = 5


def cut(body: dict[str, Any]) -> tuple[Phrases, bytes]:
    parts = canonical_parts("chat", body)
    return phrases(parts, body, SEED), b"".join(parts)


def chat(system: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "system", "content": system}], **more}


def texts(body: dict[str, Any]) -> list[bytes]:
    made, stream = cut(body)
    return [stream[a : a + n] for a, n in zip(made.starts, made.sizes, strict=True)]


def test_phrases_end_at_lines_and_punctuation_and_short_ones_join_the_next() -> None:
    assert texts(chat("You are careful, and kind to all. Yes, no: answer.\nTime: 12:30:01\n- one\n\n- two")) == [
        b"You are careful, ",
        b"and kind to all. ",
        b"Yes, no: answer.\n",
        b"Time: 12:30:01\n",
        b"- one\n\n",
        b"- two",
    ]


def test_what_stands_before_does_not_change_the_phrases_behind() -> None:
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(900)]
    shared = " ".join(words)  # not one mark of punctuation
    one, other = set(cut(chat("Anna " + shared))[0].hashes), set(cut(chat("Maximilian the Third " + shared))[0].hashes)
    assert len(one) > 15
    assert len(one & other) >= len(one) - 3


def test_another_model_shares_no_phrase() -> None:
    body = chat("You are careful, and kind to all. ")
    assert not set(cut(body)[0].hashes) & set(cut({**body, "model": "n"})[0].hashes)


def test_tools_are_one_phrase_each_whatever_the_order_of_their_keys() -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "up"}}
    turned = {"function": {"description": "up", "name": "look"}, "type": "function"}
    one, stream = cut(chat("Be good.", tools=[tool, {"type": "other"}]))
    other, _ = cut(chat("Be good.", tools=[turned, {"type": "other"}]))
    assert one.hashes == other.hashes
    assert [a == b for a, b in zip(one.spelled, other.spelled, strict=True)] == [False, True, True]
    assert (one.tools_at, one.tools) == (0, 2)
    assert stream[one.starts[1] : one.starts[1] + one.sizes[1]] == b'{"type":"other"}]'


def test_a_hostile_prompt_is_cut_to_a_bound() -> None:
    made, _ = cut(chat("\n".join("abcdefghijkl" for _ in range(100_000))))
    assert len(made) == MOST_PHRASES
    assert len(cut(chat("x" * 1_000_000))[0]) == 1
