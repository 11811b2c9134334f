"""Agentic coding sessions of kv-cache-tester (callanjfox; Apache-2.0): closed loop with think time.

One session a line; block ids of 64 tokens mean something inside one session only, written as runs
[first, count]. A "subagent" entry holds calls that the parent waits for: they are taken in place, one after another.
The source has no arrival times of sessions: they start as a Poisson process at SESSIONS_PER_S, drawn once. The tool
and system prefix is shared in the source by sessions with the same tools; ids being local, sessions with equal
(tool_tokens, system_tokens) share those blocks here. Think time is capped; both are noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loadtests.schedule import Row
from loadtests.seeds import Stream, mix
from loadtests.source import Source
from loadtests.traces.file import Trace

BLOCK_TOKENS = 64
SESSIONS_PER_S = 0.25
LONGEST_THINK_S = 60.0
LONGEST_PROMPT = 131_072  # tokens; the context length that the models of these sizes are served with


def recognises(trace: Trace) -> bool:
    return {"requests", "block_size", "hash_id_scope"} <= trace.head_object.keys()


def read(trace: Trace) -> Source:
    rows: list[Row] = []
    starts = Stream(0, "weka sessions")
    at, capped, cut = 0.0, 0, 0
    for line, session in trace.objects():
        if session.get("block_size") != BLOCK_TOKENS:
            raise trace.wrong(line, f"block_size is {session.get('block_size')!r}; {BLOCK_TOKENS} would be right")
        name = str(session.get("id") or f"line {line}")
        prefix = (int(session.get("tool_tokens") or 0), int(session.get("system_tokens") or 0))
        shared = sum(prefix) // BLOCK_TOKENS
        turn, calls = 0, 0
        for call in _calls(session.get("requests") or ()):
            calls += 1
            prompt = trace.whole(line, "in", call.get("in"), 0)
            if prompt > LONGEST_PROMPT:
                cut += 1
                break
            if prompt < 1:
                continue
            blocks = _blocks(call, line, shared, prefix, prompt, calls)
            if len(blocks) != -(-prompt // BLOCK_TOKENS):
                raise trace.wrong(line, f"hash_runs hold {len(blocks)} blocks for {prompt} tokens")
            think = float(call.get("think_time") or 0.0)
            capped += think > LONGEST_THINK_S
            rows.append(
                Row(
                    0, at if turn == 0 else None, prompt, max(1, int(call.get("out") or 0)), blocks, name, turn,
                    round(min(think, LONGEST_THINK_S), 3) if turn else 0.0,
                )
            )  # fmt: skip
            turn += 1
        if turn:
            at += starts.exponential(1.0 / SESSIONS_PER_S)
    notes = (
        f"session starts are a Poisson process of {SESSIONS_PER_S:g}/s; the source has none",
        f"think time capped at {LONGEST_THINK_S:g} s ({capped} turns)",
        f"sessions end before their first prompt above {LONGEST_PROMPT} tokens ({cut} sessions)",
        "tool and system prefix shared between sessions of equal (tool_tokens, system_tokens)",
    )
    return Source("weka", tuple(rows), at, BLOCK_TOKENS, 0.0, trace.name, trace.sha256, notes)


def _calls(requests: Any) -> Iterator[dict[str, Any]]:
    for request in requests:
        if request.get("type") == "subagent":
            yield from _calls(request.get("requests") or ())
        else:
            yield request


def _blocks(
    call: dict[str, Any], line: int, shared: int, prefix: tuple[int, int], prompt: int, number: int
) -> tuple[int, ...]:
    """Ids made global: shared for the tool and system prefix, else the session's number above the local id."""
    base = line << 32
    out: list[int] = []
    for first, count in call.get("hash_runs") or ():
        out.extend(range(base + first, base + first + count))
    if len(out) >= shared > 0 and call.get("type") != "subagent":
        root = mix(*prefix) & ~0xFFFFFF | 1 << 62
        out[:shared] = range(root, root + shared)
    if prompt % BLOCK_TOKENS:
        out.append((1 << 61) + (line << 32) + number)  # the source has ids of full blocks only
    return tuple(out)
