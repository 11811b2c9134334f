"""Prompts as segments, and conversations whose next prompt extends the last one.

A segment is so many tokens of one content. The id of block b is a hash of all segments up to the block's end, so equal
beginnings have equal ids and nothing else has. Trade-off: the partial last block of a prompt is another block once
the next turn has filled it, as it is for an engine that shares whole blocks only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtests.schedule import Row
from loadtests.seeds import Stream, mix


@dataclass(slots=True, frozen=True)
class Segment:
    content: int  # equal numbers are equal text
    tokens: int


def blocks_of(prompt: Sequence[Segment], block_tokens: int) -> tuple[int, ...]:
    """Chained ids, one per started block of the prompt."""
    return _Blocks(block_tokens).extend(prompt)


class _Blocks:
    """Ids of a prompt that grows: full blocks are kept, only the last partial one is made again."""

    def __init__(self, block_tokens: int) -> None:
        self.size = block_tokens
        self.full: list[int] = []
        self.before = 0  # hash of the segments that are wholly behind `at`
        self.at = 0  # tokens in whole segments so far

    def extend(self, segments: Sequence[Segment]) -> tuple[int, ...]:
        partial: list[int] = []
        for segment in segments:
            end = self.at + segment.tokens
            while (len(self.full) + 1) * self.size <= end:
                inside = (len(self.full) + 1) * self.size - self.at
                self.full.append(mix(self.before, segment.content, inside))
            self.before = mix(self.before, segment.content, segment.tokens)
            self.at = end
        if self.at % self.size:
            partial = [mix(self.before, self.at)]
        return (*self.full, *partial)


class Talk:
    """One closed-loop session: every turn's prompt is all that was said, answers included."""

    def __init__(self, opening: Sequence[Segment], identity: int, block_tokens: int = 64) -> None:
        self.opening = opening
        self.identity = identity
        self.block_tokens = block_tokens

    def turns(
        self,
        session: str,
        at_s: float,
        count: int,
        said: Callable[[Stream, int], int],
        answer: Callable[[Stream], int],
        think: Callable[[Stream], float],
        stream: Stream,
        longest: int = 64_000,
    ) -> list[Row]:
        """Rows of `count` turns, fewer where the prompt would pass `longest` tokens."""
        blocks, rows, pending = _Blocks(self.block_tokens), [], list(self.opening)
        for turn in range(count):
            pending.append(Segment(mix(self.identity, turn, 2), said(stream, turn)))
            if blocks.at + sum(s.tokens for s in pending) > longest:
                break
            ids = blocks.extend(pending)
            output, pause = answer(stream), think(stream)
            start = at_s if turn == 0 else None
            rows.append(Row(0, start, blocks.at, output, ids, session, turn, round(pause, 3) if turn else 0.0))
            pending = [Segment(mix(self.identity, turn, 3), output)]
        return rows
