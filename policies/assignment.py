"""Which arm a key belongs to: a pure function of key, seed and weights, so every gateway answers alike.

Weighted rendezvous hashing: arm i draws an exponential E_i = -ln(u_i) / w_i with u_i hashed from key, seed and the
arm's name; the least wins, which it does with probability w_i / sum(w) (Schindelhauer and Schomaker 2005). Each u_i
stays what it is when weights change, so a key moves only to an arm whose share grew or from one whose share
shrank: as few as possible. A second hash of the same key names its bucket, the unit in which split traffic is
counted: whole sessions, never requests. Trade-off: a bucket holds several keys, so a few of 256 units are coarser than
the keys themselves; in return memory is bounded and several gateways' counts can be added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

BUCKETS = 256
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_BUCKET_SALT = 0x5851F42D4C957F2D


def mix(value: int) -> int:
    """64 bits to 64 bits, every input bit moving half of the output (splitmix64: Steele, Lea and Flood 2014)."""
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def hashed(text: str, seed: int) -> int:
    """64 bits of a key under a seed."""
    raw = blake2b(text.encode(errors="surrogateescape"), digest_size=8, salt=(seed & _MASK).to_bytes(8, "big"))
    return int.from_bytes(raw.digest(), "big")


def unit(value: int) -> float:
    """A hash as a number above 0 and below 1."""
    return ((value >> 12) + 0.5) / (1 << 52)


def bucket(key: int) -> int:
    """The unit of counting that a key falls into, 0 to 255, whatever its arm."""
    return mix(key ^ _BUCKET_SALT) % BUCKETS


def pick(key: int, salts: Sequence[int], weights: Sequence[float]) -> int:
    """Index of the arm of a hashed key; `salts` are the hashed names. Raises ValueError when no weight is above 0."""
    best, least = -1, math.inf
    for i, weight in enumerate(weights):
        if weight > 0.0:
            drawn = -math.log(unit(mix(key ^ salts[i]))) / weight
            if drawn < least:
                best, least = i, drawn
    if best < 0:
        raise ValueError(f"weights {list(weights)}: at least one above 0 would be right")
    return best


def order(seed: int, block: int, n: int) -> list[int]:
    """The indices 0..n-1 in an order drawn for one block of time (Fisher and Yates from hashes)."""
    out = list(range(n))
    state = mix((seed & _MASK) ^ mix(block & _MASK))
    for i in range(n - 1, 0, -1):
        state = mix(state)
        j = state % (i + 1)
        out[i], out[j] = out[j], out[i]
    return out
