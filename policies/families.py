"""Prompt families, what they could share, and what keeps them from it.

`arrived` sees every request and only its chain: how much of it any request had before (the ceiling: one endless cache),
and whether to look closer. `judge` gets the phrases of those few. A family is who shares at least half of the phrases
that its requests have in common, wherever they stand, so it is found even when a changing first word leaves not one
chunk in common. Compared with the sample before, a split (`splits.py`) is a leak, and what stands behind it and was
said before in the same order is lost, unless the request's own chain was known beyond the split. Only hashes are
kept. Trade-off: samples stand for the requests between them, so the numbers of a family are estimates.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from policies.flow import Flow
from policies.leaks import LeakRow, find
from policies.phrases import Phrases
from policies.prefix import CHUNK_BYTES
from policies.seen import Seen
from policies.strata import Strata, Stratum

MOST_CHUNKS_SEEN = 262_144  # of 256 bytes: a cache of 64 MB of text
MOST_PAIRS_SEEN = 131_072
CORE_PHRASES = 192  # of the first sample, from the front
LEARNING = 16  # samples that decide what a family has in common
CORE_SHARE = 0.5
JOIN_FIRST, JOIN = 0.2, 0.5  # share of the common phrases that a newcomer must have: of one sample, of more
JOIN_BYTES = 192
_PAIR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
QUANTITIES = ("requests", "prompt", "measured_prompt", "cached", "predicted", "cacheable", "lost")


@dataclass(slots=True)
class Family:
    """`flow` holds the QUANTITIES, in tokens but for the first; measured_prompt: of requests whose cached is known."""

    id: str
    model: str
    reference: Phrases
    flow: Flow
    tenants: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    looked_at: float = 0.0  # when its last sample was
    core: dict[int, list[int]] = field(default_factory=dict)  # phrase: samples that have it, its bytes
    leaks: dict[tuple[str, int], LeakRow] = field(default_factory=dict)
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)  # phrase before a gap: words that stood there
    tokens_per_byte: float = 0.25

    common: set[int] = field(default_factory=set)  # the phrases of the core that are in enough samples
    common_bytes: int = 0

    def settle(self) -> None:
        """What is common after one more sample."""
        least = max(1, round(CORE_SHARE * min(self.samples, LEARNING)))
        self.common = {value for value, (hits, _) in self.core.items() if hits >= least}
        self.common_bytes = sum([self.core[value][1] for value in self.common])


@dataclass(slots=True)
class Arrival:
    known_bytes: int  # of the canonical stream, that some request had before
    cacheable_tokens: int
    stratum: Stratum
    wanted: bool


@dataclass(slots=True)
class Sample:
    """A request that is looked at. `text(start, size)`: bytes of the stream; `path(field, tool)`: its JSON path.

    seed: the secret that the phrases were hashed with.
    """

    phrases: Phrases
    seed: int
    model: str
    tenant: str | None
    known_bytes: int
    tokens_per_byte: float
    text: Callable[[int, int], bytes]
    path: Callable[[int, int | None], str]
    salted: Callable[[int], bool]  # whether a field is the cache salt


class Families:
    """One per gateway. `most`: families kept, and as many seen only once."""

    def __init__(self, rng: Random, most: int = 200) -> None:
        self.most = most
        self.strata = Strata(rng)
        self.families: dict[str, Family] = {}
        self.samples = 0
        self._seen = Seen(MOST_CHUNKS_SEEN)
        self._answers: dict[int, int] = {}  # last key of a chain: chunks that the answer added behind it
        self._pairs = Seen(MOST_PAIRS_SEEN)
        self._of_phrase: dict[int, list[Family]] = {}
        self._number = 0

    # -- every request -----------------------------------------------------------------------------------------------

    def arrived(self, chain: Sequence[int], prompt_bytes: int, prompt_tokens: int) -> Arrival:
        depth = known = self._seen.visit(chain)
        if depth:
            known += min(self._answers.get(chain[depth - 1], 0), prompt_bytes // CHUNK_BYTES - depth)
        tokens = 0
        if prompt_bytes:
            tokens = min(max(0, prompt_tokens - 1), round(known * CHUNK_BYTES * prompt_tokens / prompt_bytes))
        stratum = self.strata.of(chain, depth)
        return Arrival(depth * CHUNK_BYTES, tokens, stratum, self.strata.wanted(stratum, depth))

    def answered(self, chain: Sequence[int], total_bytes: int) -> None:
        """The request is over and its cache holds `total_bytes`, answer included: a next turn may continue there."""
        if chain:
            if len(self._answers) >= MOST_CHUNKS_SEEN // 8:
                self._answers.clear()
            self._answers[chain[-1]] = max(0, total_bytes // CHUNK_BYTES - len(chain))

    # -- the few -----------------------------------------------------------------------------------------------------

    def judge(self, sample: Sample, weight: int, now: float) -> tuple[Family, list[tuple[LeakRow, float]]]:
        """Finds the family of a sample and what stands where it splits; `weight`: requests that it stands for."""
        self.samples += 1
        family = self._joined(sample.phrases)
        if family is None:
            family = self._founded(sample, now)
            found: list[tuple[LeakRow, float]] = []
        else:
            found = find(family, sample, self._said_before, weight, now)
            family.reference = sample.phrases
        family.samples += 1
        family.looked_at = now
        family.tokens_per_byte = sample.tokens_per_byte
        if sample.tenant is not None:
            family.tenants[sample.tenant] += weight
        self._learn(family, sample.phrases)
        hashes = sample.phrases.hashes
        self._pairs.add([_pair(a, b) for a, b in itertools.pairwise(hashes)])
        return family, found

    def counted(self, family: Family, now: float, *values: float) -> None:
        """What a sample came to in the end: the QUANTITIES but `lost`, already times its weight."""
        family.flow.add(now, *values, 0.0)

    def _said_before(self, new: Phrases, begin: int) -> int:
        """Bytes from phrase `begin` on that were said in this order before."""
        if begin >= len(new):
            return 0
        size, hashes, pairs = new.sizes[begin], new.hashes, self._pairs
        for index in range(begin + 1, len(new)):
            if _pair(hashes[index - 1], hashes[index]) not in pairs:
                break
            size += new.sizes[index]
        return size

    # -- families ----------------------------------------------------------------------------------------------------

    def _joined(self, new: Phrases) -> Family | None:
        votes: dict[str, int] = {}
        of_phrase, families = self._of_phrase, self.families
        for value, size in dict(zip(new.hashes, new.sizes, strict=True)).items():
            for family in of_phrase.get(value, ()):
                if value in family.common:
                    votes[family.id] = votes.get(family.id, 0) + size
        best: tuple[float, Family] | None = None
        for name, size in votes.items():
            family = families[name]
            if size < JOIN_BYTES or not family.common_bytes:
                continue
            share = size / family.common_bytes
            if share >= (JOIN_FIRST if family.samples == 1 else JOIN) and (best is None or share * size > best[0]):
                best = (share * size, family)
        return None if best is None else best[1]

    def _founded(self, sample: Sample, now: float) -> Family:
        self._number += 1
        family = Family(f"f{self._number}", sample.model, sample.phrases, Flow(len(QUANTITIES), now))
        self.families[family.id] = family
        hashes, sizes = sample.phrases.hashes[:CORE_PHRASES], sample.phrases.sizes[:CORE_PHRASES]
        for value, size in zip(hashes, sizes, strict=True):
            if value not in family.core:
                family.core[value] = [0, size]
                self._of_phrase.setdefault(value, []).append(family)
        self._bound()
        return family

    def _learn(self, family: Family, new: Phrases) -> None:
        """Which phrases the family has in common; after `LEARNING` samples that is settled."""
        if family.samples > LEARNING:
            return
        for value in set(new.hashes):
            known = family.core.get(value)
            if known is not None:
                known[0] += 1
        family.settle()
        if family.samples == LEARNING:
            for value in family.core.keys() - family.common:
                self._drop(family, value)

    def _bound(self) -> None:
        """Of those seen once the oldest goes, of the others the one with the fewest tokens of late."""
        once = [f for f in self.families.values() if f.samples <= 1]
        if len(once) > self.most:
            self._forget(once[0])
        elif len(self.families) - len(once) > self.most:
            self._forget(min((f for f in self.families.values() if f.samples > 1), key=lambda f: f.flow.sums[1]))

    def _forget(self, family: Family) -> None:
        del self.families[family.id]
        for value in list(family.core):
            self._drop(family, value)

    def _drop(self, family: Family, value: int) -> None:
        del family.core[value]
        left = [other for other in self._of_phrase[value] if other is not family]
        if left:
            self._of_phrase[value] = left
        else:
            del self._of_phrase[value]


def _pair(first: int, second: int) -> int:
    return (first * _PAIR + second) & _MASK
