"""Mooncake (FAST'25): conversation, tool and agent traces with chained 512-token block ids.

One object a line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`, one per 512 tokens, the last
may be partial. The public conversation trace is stamped in 3 s ticks; replaying those as they stand makes bursts
that the source never had, so the ticks are found (their greatest common divisor) and spread by the seed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median_low

from loadtests.schedule import Row
from loadtests.source import Source
from loadtests.traces.file import Trace, rebased

BLOCK_TOKENS = 512


def recognises(trace: Trace) -> bool:
    return {"timestamp", "input_length", "hash_ids"} <= trace.head_object.keys() and "chat_id" not in trace.head_object


def read(trace: Trace) -> Source:
    rows, stamps, zero = [], [], 0
    for line, value in trace.objects():
        prompt = trace.whole(line, "input_length", value.get("input_length"), 1)
        output = trace.whole(line, "output_length", value.get("output_length"))
        stamp = trace.whole(line, "timestamp", value.get("timestamp"))
        blocks = tuple(value.get("hash_ids") or ())
        if len(blocks) != -(-prompt // BLOCK_TOKENS):
            expected = -(-prompt // BLOCK_TOKENS)
            raise trace.wrong(line, f"{len(blocks)} hash_ids for input_length {prompt}; {expected} would be right")
        zero += output == 0
        rows.append(Row(0, stamp / 1000.0, prompt, max(1, output), blocks))
        stamps.append(stamp)
    tick_s = _tick_ms(stamps) / 1000.0
    if tick_s:  # the stamps wobble by a millisecond around their grid
        rows = [
            replace(r, at_s=stamps[0] / 1000.0 + round(((r.at_s or 0.0) - stamps[0] / 1000.0) / tick_s) * tick_s)
            for r in rows
        ]
    moved, last = rebased(rows)
    notes = (f"{zero} rows with no output asked for one token",) if zero else ()
    return Source("mooncake", moved, last + tick_s, BLOCK_TOKENS, tick_s, trace.name, trace.sha256, notes)


def _tick_ms(stamps: list[int]) -> int:
    """Resolution of the stamps where it is a second or coarser and rows share it, else 0."""
    distinct = sorted(set(stamps))
    if len(distinct) < 2 or len(distinct) == len(stamps):
        return 0
    tick = median_low([b - a for a, b in pairwise(distinct)])
    if tick < 1000:
        return 0
    off = (abs((s - distinct[0] + tick // 2) % tick - tick // 2) for s in distinct)
    return tick if all(distance <= tick // 100 for distance in off) else 0
