"""Conversations with shared beginnings on two real replicas: how much of the possible prefix reuse routing keeps.

The perfect assignment is one cache that saw every prompt and answer before: the longest known run of whole blocks, at
most one token less than the prompt. Round robin runs beside it on other texts, so that neither profits from the
other's cache. How fast replicas are and how much they have to do is left out of the choice: on a busy machine one seems
slow for a moment, and what is then moved to the other is right, a matter of chance, and not asked here.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from tests.serving import Gateway, chat, gateway, post
from tests.vllm.replicas import Replicas, say

BLOCK = 32  # tokens; serve.sh sets it
GROUPS, SESSIONS, TURNS = 3, 3, 4  # sessions per group share a system text
WORDS = "river sea rain bank flood lake delta spring wave tide stream pool ford weir mill bridge".split()  # noqa: SIM905


@dataclass
class PerfectCache:
    """Every block run that was ever computed, as hashes of the token ids from the start."""

    known: set[int] = field(default_factory=set)
    lock: Lock = field(default_factory=Lock)

    def cached_tokens(self, ids: list[int]) -> int:
        with self.lock:
            whole = 0
            while (whole + 1) * BLOCK <= len(ids) - 1 and hash(tuple(ids[: (whole + 1) * BLOCK])) in self.known:
                whole += 1
            return whole * BLOCK

    def add(self, ids: list[int]) -> None:
        with self.lock:
            self.known |= {hash(tuple(ids[:end])) for end in range(BLOCK, len(ids) + 1, BLOCK)}


@dataclass
class Reuse:
    """Sums over all requests of one policy."""

    prompt: int = 0
    cached: int = 0
    possible: int = 0
    lock: Lock = field(default_factory=Lock)

    @property
    def of_perfect(self) -> float:
        return self.cached / self.possible


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def converse(front: Gateway, direct: str, group: int, seed: int, perfect: PerfectCache, reuse: Reuse) -> None:
    """One session: each turn sends all of the turns and answers before it."""
    rng = random.Random(f"{seed}-{group}")
    messages = [{"role": "system", "content": text(random.Random(f"group-{group}-{seed // 1000}"), 250)}]
    for _ in range(TURNS):
        messages.append({"role": "user", "content": text(rng, 60)})
        body = {**chat("", max_tokens=24), "messages": list(messages), "return_token_ids": True}
        ids = post(direct, {"model": "tiny", "messages": messages}, "/tokenize").json()["tokens"]
        possible = perfect.cached_tokens(ids)
        response = post(front.url, body)
        assert response.status_code == 200, response.text
        answer = response.json()
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(ids)
        perfect.add(ids + answer["choices"][0]["token_ids"])
        with reuse.lock:
            reuse.prompt += len(ids)
            reuse.cached += usage["prompt_tokens_details"]["cached_tokens"]
            reuse.possible += possible
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


def measure(replicas: Replicas, folder: Path, policy: str, run: int, config: str = "") -> Reuse:
    perfect, reuse = PerfectCache(), Reuse()
    with gateway(replicas.urls, folder, policy=policy, config=config) as front, ThreadPoolExecutor(GROUPS) as pool:
        for session in range(SESSIONS):  # one session of each group at a time
            jobs = [
                pool.submit(converse, front, replicas.urls[0], g, run * 1000 + session, perfect, reuse)
                for g in range(GROUPS)
            ]
            for job in jobs:
                job.result()
    return reuse


def test_sessions_with_shared_prefixes_keep_their_cache(replicas: Replicas, tmp_path: Path) -> None:
    run = random.SystemRandom().randrange(1 << 20)  # texts that no run before has left in a cache
    ours = measure(replicas, tmp_path, "forebay", run, "[policy.settings]\nload = false\n")
    beside = measure(replicas, tmp_path, "round_robin", run + 1)
    for name, reuse in (("forebay", ours), ("round_robin", beside)):
        say(
            f"{name}: cached {reuse.cached} of {reuse.prompt} prompt tokens, possible {reuse.possible}, "
            f"{reuse.of_perfect:.3f} of a perfect assignment"
        )
    assert ours.of_perfect >= 0.9
    assert beside.of_perfect < ours.of_perfect
