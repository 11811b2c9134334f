"""The identity of a prompt without a tokenizer: a chain of hashes over its canonical bytes.

The stream (`canonical.py` builds it) is cut into chunks of 256 bytes (about 64 tokens); key k_j is
xxh3_64(chunk_j) seeded with k_{j-1}, so that equal keys mean equal streams up to there and a match at depth j
implies every shallower one. The partial last chunk has no key: a next turn continues it. At most the first
128 KB are hashed, so that one decision has a bounded cost; what lies beyond is credited by its length (`index.py`).
Trade-off: bytes are not tokens. Depth times chunk size over the learnt bytes per token estimates the cached tokens
to within a chunk, for 60 us per 128 KB instead of the milliseconds of a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from struct import iter_unpack

from xxhash import xxh3_64_intdigest

from policies.index import PrefixIndex

__all__ = ["CHUNK_BYTES", "MAX_CHUNKS", "PrefixIndex", "chain", "chain_of_stream"]

CHUNK_BYTES = 256
MAX_CHUNKS = 512  # 128 KB
_MAX_BYTES = CHUNK_BYTES * MAX_CHUNKS
TAIL = 32  # chunks (8 KB) that an answer and the next question mostly fit into
FAR, EVERY = 128, 8  # chunks: more than that they hardly ever add, and how near its end a prompt is found then
_CHUNK = f"{CHUNK_BYTES}s"


def chain(canonical_parts: Iterable[bytes]) -> tuple[int, ...]:
    """One 64-bit key per full chunk of the joined parts, first chunk first; empty for a stream under 256 bytes."""
    return chain_of_stream(b"".join(canonical_parts))


def chain_of_stream(stream: bytes) -> tuple[int, ...]:
    """The same for a stream that is already one piece."""
    hashed = min(len(stream), _MAX_BYTES)
    view = memoryview(stream)[: hashed - hashed % CHUNK_BYTES]
    key = 0
    digest = xxh3_64_intdigest
    return tuple([key := digest(chunk, key) for (chunk,) in iter_unpack(_CHUNK, view)])


def boundaries(length: int) -> list[int]:
    """Depths of a chain at which several gateways tell each other where a prompt went: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12,
    14, 16, 20, ... up to the length: four per doubling, so that at most a fifth of a match lies between two of them."""
    out, step, depth = [], 1, 1
    while depth <= length:
        out.append(depth)
        if depth >= 8 * step:
            step *= 2
        depth += step
    return out


@lru_cache(MAX_CHUNKS + 1)
def asked(length: int) -> tuple[int, ...]:
    """Depths at which others are asked where a prompt went: the boundaries, and where the turn before this one ended:
    each of the last `TAIL` chunks, since `told` names its exact end, with what its answer added, and beyond them, after
    a long answer or question, each `EVERY`th."""
    tail = range(max(1, length - TAIL + 1), length + 1)
    far = range(max(EVERY, (length - FAR) // EVERY * EVERY), length - TAIL + 1, EVERY)
    return tuple(sorted({*boundaries(length), *far, *tail}))


@lru_cache(MAX_CHUNKS + 1)
def told(length: int) -> tuple[int, ...]:
    """Depths at which others are told of a prompt of that many chunks: the boundaries, its end, and near that end."""
    return tuple(sorted({*boundaries(length), length - length % EVERY, length} - {0}))
