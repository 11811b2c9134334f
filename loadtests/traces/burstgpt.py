"""BurstGPT (Wang et al. 2024, arXiv 2401.17644; CC-BY-4.0): two years of ChatGPT and GPT-4 calls on Azure.

CSV `Timestamp[,Session ID,Elapsed time],Model,Request tokens,Response tokens,Total tokens,Log Type`, seconds.
Rows with no response tokens are failures of the source and are left out. Rows of one session share a prefix here:
the published figures have lengths only, so a later row of a session is taken to extend the row before it.
"""

from __future__ import annotations

from loadtests.schedule import Row
from loadtests.seeds import mix, name_id
from loadtests.source import Source
from loadtests.traces.file import Trace, rebased, unshared

BLOCK_TOKENS = 64


def recognises(trace: Trace) -> bool:
    return trace.head.startswith("Timestamp,") and "Request tokens" in trace.head


def read(trace: Trace) -> Source:
    rows, failed, sessions = [], 0, 0
    for line, fields in trace.table():
        prompt = trace.whole(line, "Request tokens", fields.get("Request tokens"))
        output = trace.whole(line, "Response tokens", fields.get("Response tokens"))
        at = trace.real(line, "Timestamp", fields.get("Timestamp"))
        if prompt < 1 or output < 1:
            failed += 1
            continue
        session = (fields.get("Session ID") or "").strip()
        if session:
            sessions += 1
            root, full = name_id(session), prompt // BLOCK_TOKENS
            blocks = tuple(mix(root, i) for i in range(full))
            if prompt % BLOCK_TOKENS:
                blocks = (*blocks, mix(root, full, line))
        else:
            blocks = unshared(line, prompt, BLOCK_TOKENS)
        rows.append(Row(0, at, prompt, output, blocks, tenant=fields.get("Model") or None))
    moved, last = rebased(rows)
    notes: tuple[str, ...] = (f"{failed} failed calls of the source left out",)
    if sessions:
        notes += ("rows of one session are taken to extend each other; the trace has lengths only",)
    else:
        notes += ("no prefix identity in the trace: no prompt shares anything",)
    return Source("burstgpt", moved, last, BLOCK_TOKENS, 0.0, trace.name, trace.sha256, notes)
