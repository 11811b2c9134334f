"""Prefix chains of schedule rows: what `policies.prefix.chain` would give for their text, made from block ids instead.

One 64-bit id per 256 bytes, at four bytes a token; ids of blocks are chained already, so a chunk's id is its block's id
and the place inside. Hashing text would cost a hundred times more and say the same. Also a stand-in for the text, for
the baselines that read it, and the sparse index gateways can share (at its boundaries, for three minutes).
"""

from __future__ import annotations

from loadtests.schedule import Row
from loadtests.seeds import mix, name_id
from policies.prefix import asked, told

CHUNK_BYTES = 256
CHAIN_BYTES = 128 * 1024  # hashed before dispatch, at most
ODD, MASK = 0x9E3779B97F4A7C15, (1 << 63) - 1
SHARED_S = 180.0
SHARED_HOLDERS = 4


class Chains:
    def __init__(self, block_tokens: int, bytes_per_token: int = 4) -> None:
        self.block_tokens = block_tokens
        self.bytes_per_token = bytes_per_token
        self._block_bytes = block_tokens * bytes_per_token
        self._per_block = self._block_bytes // CHUNK_BYTES if self._block_bytes % CHUNK_BYTES == 0 else 0
        self._cache: dict[int, tuple[int, ...]] = {}
        self._shared: dict[int, dict[str, tuple[float, int]]] = {}  # until when, chunks after it

    def of(self, row: Row) -> tuple[int, ...]:
        """Full chunks only, at most 128 KB of them; the adapter separates what its text does not."""
        full = min(row.prompt_tokens * self.bytes_per_token, CHAIN_BYTES) // CHUNK_BYTES
        salt = 0 if row.adapter is None else name_id(row.adapter)
        if self._per_block:
            out: list[int] = []
            for block in row.blocks:
                if len(out) >= full:
                    break
                key = block ^ salt
                part = self._cache.get(key)
                if part is None:
                    base = mix(key)
                    part = self._cache[key] = tuple([(base + i * ODD) & MASK for i in range(self._per_block)])
                out += part
            return tuple(out[:full])
        ends = ((i + 1) * CHUNK_BYTES - 1 for i in range(full))
        return tuple(mix(row.blocks[e // self._block_bytes] ^ salt, e % self._block_bytes) for e in ends)

    def text(self, row: Row) -> str:
        """Equal exactly as far as the prompts are, of the right length; not words."""
        parts = []
        left = row.prompt_tokens * self.bytes_per_token
        for block in row.blocks:
            stamp = f"{block:016x}"
            take = min(left, self._block_bytes)
            parts.append((stamp * (take // 16 + 1))[:take])
            left -= take
        return "".join(parts)

    def share(self, row: Row, replica_id: str, now: float, answer_tokens: int = 0, stays_s: float = SHARED_S) -> None:
        """Tell the other gateways that this prompt went there, how long its answer was when that is known, and how
        long such a thing stays cached."""
        chain = self.of(row)
        whole = (row.prompt_tokens + answer_tokens) * self.bytes_per_token // CHUNK_BYTES
        for depth in told(len(chain)):
            holders = self._shared.setdefault(chain[depth - 1], {})
            holders[replica_id] = (now + min(stays_s, SHARED_S), whole - depth if depth == len(chain) else 0)
            if len(holders) > SHARED_HOLDERS:
                del holders[min(holders, key=lambda r: (holders[r][0], r))]

    def shared_depth(self, row: Row, now: float) -> dict[str, int]:
        """Replica -> chunks that somebody sent there in the last three minutes."""
        chain = self.of(row)
        found: dict[str, int] = {}
        for depth in asked(len(chain)):
            for replica_id, (until, more) in self._shared.get(chain[depth - 1], {}).items():
                if now <= until:
                    found[replica_id] = depth + more
        return found
