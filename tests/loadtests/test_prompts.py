"""Prompt text: equal block ids give equal bytes, in any process, and lengths are the row's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from loadtests.prompts import WORDS, block_text, text, token_ids
from loadtests.schedule import Row

ROW = Row(0, 0.0, 150, 5, (11, 22, 33))


def test_a_prompt_has_one_word_a_token() -> None:
    assert len(text(ROW, 64).split()) == 150


def test_prompts_are_equal_exactly_as_far_as_their_blocks() -> None:
    other = Row(1, 0.0, 192, 5, (11, 22, 44))
    first, second = text(ROW, 64), text(other, 64)
    shared = block_text(11, 64) + block_text(22, 64)
    assert first.startswith(shared)
    assert second.startswith(shared)
    assert first[len(shared) :][:20] != second[len(shared) :][:20]


def test_a_partial_block_is_the_beginning_of_the_whole_one() -> None:
    assert block_text(33, 64).startswith(block_text(33, 22))


def test_bytes_are_the_same_in_a_process_with_another_hash_seed() -> None:
    code = "from loadtests.prompts import block_text; print(block_text(11, 6))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.rstrip("\n") == block_text(11, 6) == PINNED


PINNED = " its may as all only small"


def test_words_are_short_lower_case_and_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS) >= 200
    assert all(word.isalpha() and word.islower() and len(word) <= 9 for word in WORDS)


def test_token_ids_are_in_range_and_shared_as_the_text_is() -> None:
    ids, other = token_ids(ROW, 64, 32_000), token_ids(Row(1, 0.0, 64, 5, (11,)), 64, 32_000)
    assert len(ids) == 150
    assert ids[:64] == other
    assert min(ids) >= 1000
    assert max(ids) < 32_000
    with pytest.raises(ValueError, match="vocabulary is 500"):
        token_ids(ROW, 64, 500)
