"""One request to a replica, timed at the client: what calibration fits and validation compares.

Prompts are token ids drawn from a seed, so that lengths are exact and nothing hits the cache unless it is meant to;
answers are of forced length (`ignore_eos`). Works against any server with vLLM's /v1/completions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import orjson

from loadtests.answer import Answer
from loadtests.client import Client

FIRST_ID, LAST_ID = 300, 700  # words in any vocabulary, clear of special tokens


@dataclass(slots=True, frozen=True)
class Observed:
    """Seconds from sending, and the replica's own counts."""

    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float
    cached_tokens: int

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for one token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class ReplicaError(Exception):
    """The replica's answer cannot be used; says why."""


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(tokens)]


async def ask(client: Client, model: str, ids: list[int], output_tokens: int) -> Observed:
    """Raises ReplicaError when the answer is not complete or not of the asked length."""
    body = {
        "model": model, "prompt": ids, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer = Answer(forced_tokens=output_tokens)
    start = client.clock()
    await client.send("/v1/completions", orjson.dumps(body), answer)
    fault = answer.fault()
    if fault is not None or answer.first_content_at is None or answer.last_content_at is None:
        why = fault[1] if fault is not None else "no content"
        raise ReplicaError(f"prompt of {len(ids)} tokens, {output_tokens} to answer: {why}")
    return Observed(
        prompt_tokens=answer.prompt_tokens or len(ids),
        output_tokens=answer.output_tokens,
        ttft_s=answer.first_content_at - start,
        e2e_s=answer.last_content_at - start,
        cached_tokens=answer.cached_tokens or 0,
    )
