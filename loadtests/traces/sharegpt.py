"""ShareGPT-style text: a JSON list (or lines) of {"conversations": [{"from": "human"|"gpt", "value": text}, ...]}.

Each human message is a turn whose prompt is the whole conversation so far; turns are closed loop. Lengths are
estimated at four bytes a token (no tokenizer here; measured for English by most public BPE vocabularies), block ids
are hashes of the text, so equal beginnings share. The files have no times: sessions start as a Poisson process and
users think log-normally; both are noted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from loadtests.schedule import Row
from loadtests.seeds import Stream
from loadtests.source import Source
from loadtests.traces.file import Trace

BLOCK_TOKENS = 64
BYTES_PER_TOKEN = 4
SESSIONS_PER_S = 1.0
THINK_P50_S, THINK_P90_S, LONGEST_THINK_S = 10.0, 60.0, 120.0
_HUMAN, _MODEL = {"human", "user"}, {"gpt", "assistant", "chatgpt", "bing", "bard", "model"}


def recognises(trace: Trace) -> bool:
    head = trace.text.lstrip()[:1]
    return head in ("[", "{") and '"conversations"' in trace.text[:200_000]


def read(trace: Trace) -> Source:
    rows: list[Row] = []
    stream = Stream(0, "sharegpt")
    at, skipped = 0.0, 0
    for number, conversation in _conversations(trace):
        text, turn, name = b"", 0, str(conversation.get("id") or f"conversation {number}")
        messages = conversation.get("conversations") or []
        for said, answer in pairwise(messages):
            if said.get("from") not in _HUMAN or answer.get("from") not in _MODEL:
                continue
            text += b"\x1euser\x1f" + str(said.get("value") or "").encode()
            reply = str(answer.get("value") or "").encode()
            prompt, output = _tokens(text), _tokens(reply)
            think = min(LONGEST_THINK_S, stream.lognormal(THINK_P50_S, THINK_P90_S)) if turn else 0.0
            session = f"{number}:{name}"
            at_s = at if turn == 0 else None
            rows.append(Row(0, at_s, prompt, output, _blocks(text, prompt), session, turn, round(think, 3)))
            text += b"\x1eassistant\x1f" + reply
            turn += 1
        if turn:
            at += stream.exponential(1.0 / SESSIONS_PER_S)
        else:
            skipped += 1
    if not rows:
        raise trace.wrong(1, 'no conversation has a "human" message followed by a "gpt" one')
    notes = (
        f"lengths are estimates at {BYTES_PER_TOKEN} bytes a token",
        f"the file has no times: sessions start as a Poisson process of {SESSIONS_PER_S:g}/s, users think log-normally",
        f"{skipped} conversations without a question and its answer left out",
    )
    return Source("sharegpt", tuple(rows), at, BLOCK_TOKENS, 0.0, trace.name, trace.sha256, notes)


def _conversations(trace: Trace) -> Iterator[tuple[int, dict[str, Any]]]:
    if trace.text.lstrip().startswith("["):
        try:
            listed = json.loads(trace.text)
        except json.JSONDecodeError as error:
            raise trace.wrong(error.lineno, f"no JSON ({error.msg})") from error
        yield from enumerate(listed, 1)
    else:
        yield from trace.objects()


def _tokens(text: bytes) -> int:
    return max(1, -(-len(text) // BYTES_PER_TOKEN))


def _blocks(text: bytes, prompt_tokens: int) -> tuple[int, ...]:
    """Chained: each id is a hash of everything up to the block's end."""
    size, running, out = BLOCK_TOKENS * BYTES_PER_TOKEN, hashlib.blake2b(digest_size=8), []
    for i in range(-(-prompt_tokens // BLOCK_TOKENS)):
        running.update(text[i * size : (i + 1) * size])
        out.append(int.from_bytes(running.copy().digest(), "big") >> 1)
    return tuple(out)
