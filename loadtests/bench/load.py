"""What is sent: request bodies of a given size, and one run of the load client.

Prompts look like conversations (a system text, then turns), carry a number of their own near the end, so that no two
are equal and everything before it is shared, and ask for a fixed number of tokens.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WORDS = "the river runs to the sea and the sea gives it back as rain "
STALLED_S = 60.0
NUMBER = "########"  # the load client writes a new number over it


@dataclass(frozen=True, slots=True)
class Run:
    """What the load client saw. `events` are `data:` lines without [DONE]; latencies of whole answers."""

    answers: int
    events: int
    errors: int
    first_error: str
    seconds: float
    p50_us: int
    p99_us: int


def chat_body(prompt_bytes: int, *, turns: int, max_tokens: int, stream: bool) -> bytes:
    """A chat request for the model `null` whose messages hold about `prompt_bytes` of text in `turns` messages."""
    each = max(prompt_bytes // turns, len(NUMBER) + 1)
    text = WORDS * (each // len(WORDS) + 1)
    roles = ["system", *("user" if i % 2 == 0 else "assistant" for i in range(turns - 1))] if turns > 1 else ["user"]
    messages = [{"role": role, "content": text[:each]} for role in roles]
    messages[-1] = {"role": "user", "content": f"{text[: each - len(NUMBER) - 1]} {NUMBER}"}
    body = {"model": "null", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return json.dumps(body | ({"stream": True} if stream else {})).encode()


def drive(
    client: Sequence[str],
    port: int,
    body: Path,
    *,
    connections: int,
    seconds: float = 0,
    each: int = 0,
    stagger_us: int = 0,
    period_us: int = 0,
) -> Run:
    """One run of the load client, until `seconds` or `each` answers per connection: a closed loop, or with `period_us`
    an open one, in which each connection sends so far apart.

    A run in which an answer never comes is an error of its own: `answers` is then 0 and `first_error` says so.
    """
    argv = [*client, *map(str, (port, connections, seconds, each, stagger_us, body, period_us))]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=seconds + STALLED_S)
    except subprocess.TimeoutExpired:
        return Run(0, 0, 1, f"some answer did not come within {STALLED_S:g} s", seconds + STALLED_S, 0, 0)
    return Run(**json.loads(done.stdout))
