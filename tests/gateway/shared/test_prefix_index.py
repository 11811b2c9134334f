"""What a gateway remembers of what it wrote into the shared index: the last of it, so that nothing is written twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.shared import prefix_index
from gateway.shared.prefix_index import PrefixIndex


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def index(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> PrefixIndex:
    monkeypatch.setattr(prefix_index, "MOST_WRITTEN", 3)
    store: Any = SimpleNamespace(up=True, key=lambda *parts: ":".join(parts), table=SimpleNamespace(index_ttl_s=400.0))
    return PrefixIndex(store, lambda _: None, clock)


def written(index: PrefixIndex, *prompts: int) -> list[str]:
    """The hashes of these prompts of one chunk that are written now."""
    for prompt in prompts:
        index.answered((prompt,), "r0")
    return [str(key) for command in index.commands() for key in command[3 : 3 + int(command[2])]]


def key(prompt: int) -> str:
    return f"p:{prompt:016x}"


def test_what_was_written_lately_is_not_written_again_for_a_quarter_of_its_life(
    index: PrefixIndex, clock: Clock
) -> None:
    assert written(index, 1, 2, 1) == [key(1), key(2)]
    assert written(index, 1, 2) == []
    clock.now = 100.0
    assert written(index, 1) == []
    clock.now = 100.1
    assert written(index, 1) == [key(1)]


def test_the_last_ones_are_remembered_counting_from_when_they_were_written_last(
    index: PrefixIndex, clock: Clock
) -> None:
    written(index, 1, 2)
    clock.now = 101.0
    assert written(index, 1, 3) == [key(1), key(3)]
    assert written(index, 4) == [key(4)], "with it the first 1 and 2 are three too many"
    assert written(index, 1, 3, 4) == []
    assert written(index, 5, 2) == [key(5), key(2)]
    assert len(index._written) == len(index._order) == 3


def test_after_redis_lost_it_everything_is_written_again(index: PrefixIndex) -> None:
    written(index, 1, 2, 3)
    index.forget_written()
    assert written(index, 1, 2, 3, 4) == [key(1), key(2), key(3), key(4)]
