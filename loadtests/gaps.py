"""How long a prefix group rests between two uses: whether caches of a given size can matter at all.

When nearly all re-uses come within seconds every policy hits and all tie; when they come minutes and millions of tokens
apart, only large caches hit. A result without this figure lets the choice of workload decide the winner. The group of a
prompt is its session, or its first block that is not the one that most prompts share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from loadtests.record import Record
from loadtests.schedule import Row
from loadtests.source import group_of, shared_block
from policies.statistics import percentiles


def group_gaps(rows: Sequence[Row], records: Iterable[Record]) -> dict[str, Any]:
    """Quantiles of the seconds between uses of a group, `n` re-uses, and the prompt tokens that came in between."""
    when = {r.id: r.scheduled_s for r in records if r.scheduled_s is not None}
    common = shared_block(rows)
    last: dict[int, tuple[float, int]] = {}
    seconds: list[float] = []
    tokens: list[float] = []
    passed = 0
    for row in sorted((r for r in rows if r.id in when), key=lambda r: (when[r.id], r.id)):
        at, group = when[row.id], group_of(row, common)
        if group in last:
            before, then = last[group]
            seconds.append(at - before)
            tokens.append(passed - then)
        passed += row.prompt_tokens
        last[group] = (at, passed)
    return {"seconds": asdict(percentiles(seconds)), "prompt_tokens_between": asdict(percentiles(tokens))}
