"""Azure LLM inference trace 2023 (published with Splitwise, ISCA 2024; CC-BY-4.0).

CSV `TIMESTAMP,ContextTokens,GeneratedTokens`, seven fractional digits. It holds no prefix, session or user
identity, so nothing is shared here: a replay that wants reuse has to use another trace.
"""

from __future__ import annotations

from datetime import datetime

from loadtests.schedule import Row
from loadtests.source import Source
from loadtests.traces.file import Trace, rebased, unshared

BLOCK_TOKENS = 64


def recognises(trace: Trace) -> bool:
    return trace.head.startswith("TIMESTAMP,ContextTokens,GeneratedTokens")


def read(trace: Trace) -> Source:
    rows = []
    for line, fields in trace.table():
        stamp = fields.get("TIMESTAMP") or ""
        whole, _, fraction = stamp.partition(".")
        try:
            seconds = (datetime.fromisoformat(whole) - datetime(2023, 1, 1)).total_seconds()
        except (ValueError, TypeError):
            raise trace.wrong(line, f"TIMESTAMP is {stamp!r}; 2023-11-16 18:15:46.6805900 would be right") from None
        digits = "".join(c for c in fraction if c.isdigit())[:7]
        at = seconds + (int(digits) / 10.0 ** len(digits) if digits else 0.0)
        prompt = trace.whole(line, "ContextTokens", fields.get("ContextTokens"), 1)
        output = trace.whole(line, "GeneratedTokens", fields.get("GeneratedTokens"))
        rows.append(Row(0, round(at, 7), prompt, max(1, output), unshared(line, prompt, BLOCK_TOKENS)))
    moved, last = rebased(rows)
    notes = ("no prefix identity in the trace: no prompt shares anything",)
    return Source("azure", moved, last, BLOCK_TOKENS, 0.0, trace.name, trace.sha256, notes)
