"""Forebay's own journal: replay yesterday's traffic against another policy.

One line per request (`gateway/journal.py`). Prompt text is not in it; its chain is: one keyed hash per 256 bytes, so
what was shared yesterday is shared again. A token takes prompt_bytes / prompt_tokens bytes; a block of 64 tokens gets
its id from the last chunk it touches, chained ids being enough to say that everything before is equal too.
Requests that never got an answer have no output length: they ask for the median of the others.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from loadtests.schedule import Row
from loadtests.seeds import mix
from loadtests.source import Source
from loadtests.traces.file import Trace, rebased

BLOCK_TOKENS = 64
CHUNK_BYTES = 256


def recognises(trace: Trace) -> bool:
    return {"received_unix", "chain"} <= trace.head_object.keys()


def read(trace: Trace) -> Source:
    rows: list[Row] = []
    unknown: list[int] = []
    left_out = 0
    for line, value in trace.objects():
        if value.get("kind", "generate") != "generate" or value.get("client_retry"):
            left_out += 1
            continue
        prompt = count(value.get("prompt_tokens"))
        size = trace.whole(line, "prompt_bytes", value.get("prompt_bytes") or 0)
        prompt = prompt or -(-size // 4)
        if prompt < 1:
            left_out += 1
            continue
        output = count(value.get("completion_tokens"))
        if not output:
            unknown.append(len(rows))
        at = trace.real(line, "received_unix", value.get("received_unix"))
        chain = [trace.whole(line, "chain", item) for item in value.get("chain") or ()]
        blocks = _blocks(chain, prompt, max(size, prompt) / prompt, line)
        name = str(value.get("service_class") or "standard")
        rows.append(
            Row(
                0, at, prompt, output or 1, blocks, value.get("session"), service_class=name,
                tenant=value.get("tenant"), adapter=value.get("adapter"),
            )
        )  # fmt: skip
    if not rows:
        raise trace.wrong(1, "no generating request in this journal")
    known = [r.output_tokens for i, r in enumerate(rows) if i not in set(unknown)]
    fill = round(median(known)) if known else 100
    for i in unknown:
        rows[i] = replace(rows[i], output_tokens=fill)
    moved, last = rebased(rows)
    notes = (
        f"{len(unknown)} requests without an answer ask for the median of {fill} tokens",
        f"{left_out} lines left out: they generate nothing, or repeat a request the client sent before",
    )
    return Source("journal", moved, last, BLOCK_TOKENS, 0.0, trace.name, trace.sha256, notes)


def count(value: Any) -> int | None:
    """A token count of the journal, written as [number or null, source]."""
    if isinstance(value, list):
        value = value[0] if value else None
    return int(value) if isinstance(value, int | float) else None


def _blocks(chain: list[int], prompt: int, bytes_per_token: float, line: int) -> tuple[int, ...]:
    out = []
    for i in range(-(-prompt // BLOCK_TOKENS)):
        end = min(prompt, (i + 1) * BLOCK_TOKENS)
        chunk = -(-int(end * bytes_per_token) // CHUNK_BYTES) - 1
        # behind the chain's end (128 KB, or the partial last chunk) nothing is known to be shared
        out.append(mix(chain[chunk], i) if 0 <= chunk < len(chain) else mix(line, i, 1))
    return tuple(out)
