"""Where two prompts part, and where they meet again."""

from __future__ import annotations

import random
from array import array

from policies.phrases import Phrases
from policies.splits import How, Split, splits


def prompt(*values: int, spelled: dict[int, int] | None = None, tools: int = 0) -> Phrases:
    """Phrases of 64 bytes each, by number."""
    made = Phrases(tools=tools)
    for n, value in enumerate(values):
        made.add(value, 64 * n, 64, 0, (spelled or {}).get(value))
    return made


def test_the_same_prompt_has_no_split() -> None:
    assert list(splits(prompt(1, 2, 3), prompt(1, 2, 3))) == []


def test_a_shared_part_that_ends_is_no_split() -> None:
    assert list(splits(prompt(1, 2, 3, 70, 71, 72), prompt(1, 2, 3, 80, 81))) == []


def test_a_value_that_changes_before_a_shared_part() -> None:
    assert list(splits(prompt(1, 70, 2, 3, 4, 90), prompt(1, 80, 81, 2, 3, 4, 91))) == [Split(How.VALUE, 1, 2, 1, 3)]


def test_two_values() -> None:
    new, old = prompt(70, 1, 2, 3, 71, 4, 5, 6), prompt(80, 1, 2, 3, 81, 4, 5, 6)
    assert list(splits(new, old)) == [Split(How.VALUE, 0, 1, 0, 1), Split(How.VALUE, 4, 5, 4, 5)]


def test_one_phrase_in_common_is_no_meeting() -> None:
    assert list(splits(prompt(1, 70, 2, 71), prompt(1, 80, 2, 81))) == []


def test_examples_in_another_order() -> None:
    new, old = prompt(1, 11, 12, 21, 22, 31, 32, 9), prompt(1, 31, 32, 11, 12, 21, 22, 9)
    assert list(splits(new, old)) == [Split(How.ORDER, 1, 7, 1, 7)]


def test_other_documents_are_no_other_order() -> None:
    new, old = prompt(1, *range(10, 20), *range(30, 40), 70), prompt(1, *range(30, 40), *range(50, 60), 80)
    assert [s.how for s in splits(new, old)] == [How.VALUE]


def test_tools_whose_keys_moved() -> None:
    new = prompt(1, 2, 3, 4, spelled={2: 102, 3: 103}, tools=3)
    assert list(splits(new, prompt(1, 2, 3, 4, tools=3))) == [Split(How.KEYS, 1, 3, 1, 3)]


def test_any_two_prompts_are_compared_to_the_end() -> None:
    rng = random.Random(3)
    for _ in range(300):
        new = prompt(*(rng.randrange(12) for _ in range(rng.randrange(60))), tools=rng.randrange(3))
        old = prompt(*(rng.randrange(12) for _ in range(rng.randrange(60))), tools=rng.randrange(3))
        at = 0
        for split in splits(new, old):
            assert at <= split.at <= split.meets <= len(new)
            at = split.meets


def test_phrases_are_kept_as_numbers() -> None:
    assert isinstance(prompt(1).hashes, array)
