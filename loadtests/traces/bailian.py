"""Qwen-Bailian usage traces (Wang et al., USENIX ATC 2025, arXiv 2506.02634; Apache-2.0).

One object a line: `chat_id`, `parent_chat_id` (-1 at a root), `timestamp` (s), `input_length`, `output_length`,
`type`, `turn`, `hash_ids`, one per 16 tokens. Their ids hash a block's own content, so they are chained here:
the same block behind another prefix is another block for a KV cache.
"""

from __future__ import annotations

from loadtests.schedule import Row
from loadtests.seeds import mix
from loadtests.source import Source
from loadtests.traces.file import Trace, rebased

BLOCK_TOKENS = 16


def recognises(trace: Trace) -> bool:
    return {"chat_id", "parent_chat_id", "hash_ids"} <= trace.head_object.keys()


def read(trace: Trace) -> Source:
    rows, cut = [], 0
    for line, value in trace.objects():
        prompt = trace.whole(line, "input_length", value.get("input_length"), 1)
        output = trace.whole(line, "output_length", value.get("output_length"))
        at = trace.real(line, "timestamp", value.get("timestamp"))
        chained, chain = [], 0
        for content in value.get("hash_ids") or ():
            chain = mix(chain, content)
            chained.append(chain)
        wanted = -(-prompt // BLOCK_TOKENS)
        if len(chained) > wanted or len(chained) < wanted - 1:
            raise trace.wrong(line, f"{len(chained)} hash_ids for input_length {prompt}; {wanted} would be right")
        if len(chained) < wanted:  # the partial last block has no id
            cut += 1
            chained.append(mix(chain, line, 1))
        tenant = value.get("type")
        rows.append(Row(0, at, prompt, max(1, output), tuple(chained), tenant=tenant if tenant else None))
    moved, last = rebased(rows)
    notes: tuple[str, ...] = ("ids of the source hash single blocks; chained here",)
    if cut:
        notes += (f"{cut} rows without an id for their partial last block: taken as shared with nothing",)
    return Source("bailian", moved, last, BLOCK_TOKENS, 0.0, trace.name, trace.sha256, notes)
