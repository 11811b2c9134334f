"""How much of the prompts could have been reused at all, whatever the policy.

Ceiling: one cache without end, rows in order of schedule; the share of prompt tokens in leading blocks seen before.
Round-robin ceiling: the same with as many such caches as replicas, rows dealt in turn. A claim above the ceiling is a
fault of the measurement. Trade-off: whole blocks of the schedule count, so blocks finer than the schedule's (vLLM: 16
tokens) may reuse a little more than this says at the end of a shared part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadtests.schedule import Row


def ceiling(
    rows: Sequence[Row],
    block_tokens: int,
    replicas: int = 1,
    held: Callable[[Row], Sequence[int]] = lambda row: row.blocks,
) -> float | None:
    """Share of prompt tokens, 0..1; None without prompts. `replicas` caches, rows dealt in turn.

    `held`: the blocks a cache has after a row; its prompt's, or more where the answer is sent back in a later turn.
    """
    caches: list[set[tuple[str | None, int]]] = [set() for _ in range(replicas)]
    reused = total = 0
    ordered = sorted(rows, key=lambda r: (r.at_s is None, r.at_s or 0.0, r.id)) if replicas > 1 else list(rows)
    for turn, row in enumerate(ordered):
        cache = caches[turn % replicas]
        total += row.prompt_tokens
        hit = 0
        for block in row.blocks:
            if (row.adapter, block) not in cache:
                break
            hit += 1
        reused += min(hit * block_tokens, max(0, row.prompt_tokens - 1))
        cache.update((row.adapter, block) for block in held(row))
    return reused / total if total else None
