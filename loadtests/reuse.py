"""How much of the prompts could have been reused at all, whatever the policy.

Ceiling: one cache without end, rows in order of schedule; the share of prompt tokens in leading blocks seen before.
Round-robin ceiling: the same with as many such caches as replicas, rows dealt in turn. A claim above the ceiling is a
fault of the measurement. Trade-off: whole blocks of the schedule count, so blocks finer than the schedule's (vLLM: 16
tokens) may reuse a little more than this says at the end of a shared part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import takewhile

from loadtests.schedule import Row


def ceiling(
    rows: Sequence[Row],
    block_tokens: int,
    replicas: int = 1,
    held: Callable[[Row], Sequence[int]] | None = None,
) -> float | None:
    """Share of prompt tokens, 0..1; None without prompts. `replicas` caches, rows dealt in turn.

    `held`: the blocks a cache has after a row; by default its prompt's, more where the answer is sent back later.
    """
    caches: dict[tuple[int, str | None], set[int]] = defaultdict(set)
    reused = total = 0
    ordered = sorted(rows, key=lambda r: (r.at_s is None, r.at_s or 0.0, r.id)) if replicas > 1 else rows
    for turn, row in enumerate(ordered):
        cache = caches[turn % replicas, row.adapter]
        total += row.prompt_tokens
        hit = len(list(takewhile(cache.__contains__, row.blocks)))
        reused += min(hit * block_tokens, max(0, row.prompt_tokens - 1))
        cache.update(row.blocks[hit:] if held is None else held(row))
    return reused / total if total else None
