"""The pool of runs against a pool of single blocks written as vLLM's rules read, over random lives of requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.blocks import BlockPool, Table, coarsen

UNIT = 4  # blocks per unit


class PlainPool:
    """One list entry per block: free queue, hash to blocks in order of creation."""

    def __init__(self, usable: int) -> None:
        self.queue = list(range(usable))
        self.hash_of: dict[int, tuple[int, int]] = {}
        self.blocks_of: dict[tuple[int, int], list[int]] = {}
        self.refs = dict.fromkeys(range(usable), 0)
        self.evicted: list[tuple[int, int]] = []

    def match(self, names: list[tuple[int, int]]) -> list[int]:
        hits = []
        for name in names:
            if not self.blocks_of.get(name):
                break
            hits.append(self.blocks_of[name][0])
        return hits

    def hold(self, hits: list[int]) -> None:
        for block in hits:
            if not self.refs[block]:
                self.queue.remove(block)
            self.refs[block] += 1

    def take(self, count: int) -> list[int]:
        taken = [self.queue.pop(0) for _ in range(count)]
        for block in taken:
            if (name := self.hash_of.pop(block, None)) is not None:
                self.blocks_of[name].remove(block)
                self.evicted.append(name)
            self.refs[block] = 1
        return taken

    def fill(self, block: int, name: tuple[int, int]) -> None:
        self.hash_of[block] = name
        self.blocks_of.setdefault(name, []).append(block)

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                if block in self.hash_of:
                    self.queue.append(block)
                else:
                    self.queue.insert(0, block)


def names_of(chain: list[int], blocks: int) -> list[tuple[int, int]]:
    return [(chain[i // UNIT], i % UNIT) for i in range(blocks)]


requests = st.lists(
    st.tuples(
        st.integers(0, 2),  # shared prefix
        st.integers(0, 4),  # units of it
        st.integers(1, 40),  # blocks' worth of prompt
        st.booleans(),  # a partial last block
        st.integers(1, 3),  # chunks
        st.integers(0, 5),  # how many requests later it ends
    ),
    min_size=1,
    max_size=25,
)


@given(requests)
@settings(max_examples=300, deadline=None)
def test_runs_hit_and_evict_as_single_blocks_do(rows: list[tuple[int, int, int, bool, int, int]]) -> None:
    pool, plain = BlockPool(65, 4, 4 * UNIT), PlainPool(64)
    pool.evictions = []
    alive: list[tuple[int, Table, list[int], list[int], int]] = []
    for at, (prefix, shared, blocks, partial, chunks, lives) in enumerate(rows):
        units = -(-blocks // UNIT)
        chain = [prefix * 100 + u if u < shared else 1000 * (at + 1) + u for u in range(units + 1)]
        tokens = blocks * 4 + (2 if partial else 0)
        found = pool.match(chain, (tokens - 1) // 4)
        hits = plain.match(names_of(chain, (tokens - 1) // 4))
        assert found.blocks == len(hits)
        wanted = -(-tokens // 4) - found.blocks
        if wanted + found.idle > pool.free:
            continue
        assert found.idle == sum(plain.refs[b] == 0 for b in hits)
        table = pool.claim(found)
        plain.hold(hits)
        held, done = list(hits), found.blocks * 4
        for chunk in range(chunks):
            until = tokens if chunk == chunks - 1 else done + (tokens - done) // 2
            new = -(-until // 4) - -(-done // 4)
            pool.take(new)
            held += plain.take(new)
            pool.fill(table, chain, until // 4)
            for i in range(done // 4, until // 4):
                plain.fill(held[i], names_of(chain, i + 1)[i])
            done = until
        alive.append((at + lives, table, chain, held, tokens))
        for one in [one for one in alive if one[0] <= at]:
            pool.release(one[1], one[2], one[4])
            plain.release(one[3])
            alive.remove(one)
        assert pool.free == len(plain.queue)
        assert pool.evictions == plain.evicted


def test_an_eviction_takes_the_tail_of_what_was_freed_longest_ago() -> None:
    pool = BlockPool(9, 16, 64)
    pool.evictions = []
    for chain in ([1], [2]):
        table = pool.claim(pool.match(chain, 4))
        pool.take(4)
        pool.fill(table, chain, 4)
        pool.release(table, chain, 64)
    pool.take(5)
    assert pool.evictions == [(1, 3), (1, 2), (1, 1), (1, 0), (2, 3)]


def test_reset_needs_every_block_to_be_free() -> None:
    pool = BlockPool(9, 16)
    table = pool.claim(pool.match([1, 2], 2))
    pool.take(2)
    pool.fill(table, [1, 2], 2)
    assert not pool.reset()
    pool.release(table, [1, 2], 32)
    assert pool.cached(1) == 1
    assert pool.reset()
    assert pool.cached(1) == 0


def test_a_unit_is_a_multiple_of_the_block() -> None:
    with pytest.raises(ValueError, match="unit_tokens 40 must be a multiple of block_size 16"):
        BlockPool(9, 16, 40)


def test_coarser_ids_are_the_last_of_each_group_since_ids_are_chained() -> None:
    assert coarsen([1, 2, 3, 4, 5], 2) == (2, 4)
