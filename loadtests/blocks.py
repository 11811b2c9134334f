"""The block pool and prefix cache of a vLLM replica, kept as runs of blocks instead of blocks.

Rules (vLLM V1 block pool): allocation pops the front of the free queue; a freed request returns its blocks tail
first; hashed blocks go to the back (least recently freed is evicted first), the unhashed last block to the front; a
hit takes blocks out of the queue; a recomputed block is stored as a second copy. So everything unhashed stands before
everything hashed: a count is enough for it, and the hashed part is a linked list of runs, each evicted from its own
tail. A run is consecutive blocks of one *unit*: `unit_tokens` (a multiple of the block) that share one chained id.
With a trace's 512-token ids a 12k-token prompt costs 24 operations instead of 750; counts, hits and eviction order
stay those of blocks. What changes: two prompts that part inside a unit share nothing of that unit, as the ids say.
Ids of blocks filled while decoding are entered when somebody looks or the request leaves.
"""

from __future__ import annotations

from collections.abc import Sequence


class Run:
    """Blocks [start, start + length) of a unit, all held by the same requests. In the free queue when `refs` is 0."""

    __slots__ = ("key", "length", "next", "prev", "refs", "start", "twin")

    def __init__(self, key: int | None, start: int, length: int, refs: int) -> None:
        self.key = key
        self.start = start
        self.length = length
        self.refs = refs
        self.prev: Run = self
        self.next: Run = self
        self.twin: Run | None = None  # next run of the same unit, in order of creation


class Table:
    """What one running request holds: hashed runs from the start of its sequence, `full` blocks in all."""

    __slots__ = ("full", "runs")

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.full = 0


class Match:
    """A prefix found in the cache: pieces (run, from, to), its blocks, and how many of these are in the free queue."""

    __slots__ = ("blocks", "idle", "pieces")

    def __init__(self) -> None:
        self.pieces: list[tuple[Run, int, int]] = []
        self.blocks = 0
        self.idle = 0


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens; block 0 is vLLM's null block and never used."""

    def __init__(self, num_blocks: int, block_size: int, unit_tokens: int | None = None, caching: bool = True) -> None:
        unit_tokens = unit_tokens or block_size
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"num_blocks {num_blocks}, block_size {block_size}: need at least 2 blocks of 1 token")
        if unit_tokens % block_size:
            raise ValueError(f"unit_tokens {unit_tokens} must be a multiple of block_size {block_size}")
        self.block_size = block_size
        self.usable = num_blocks - 1
        self.per_unit = unit_tokens // block_size
        self.caching = caching
        self.free = self.usable  # blocks in the free queue, hashed or not
        self.evictions: list[tuple[int | None, int]] | None = None  # set to a list to record (unit id, block in unit)
        self._blank = self.usable
        self._index: dict[int, Run] = {}
        self._tables: dict[Table, None] = {}
        self._queue = Run(None, 0, 0, 0)  # sentinel: next is the front

    # -- prefix cache ----------------------------------------------------------------------------------------------

    def match(self, chain: Sequence[int], limit: int) -> Match:
        """Longest cached prefix of `chain`, at most `limit` blocks. Changes nothing."""
        found = Match()
        if not self.caching or limit <= 0:
            return found
        index, per_unit, pieces = self._index, self.per_unit, found.pieces
        for key in chain:
            run = index.get(key)
            if run is None:
                break
            want = min(per_unit, limit - found.blocks)
            at = 0
            while at < want and run is not None:
                end = run.start + run.length
                if run.start <= at < end:
                    to = end if end < want else want
                    pieces.append((run, at, to))
                    if not run.refs:
                        found.idle += to - at
                    at = to
                    run = index[key]
                else:
                    run = run.twin
            found.blocks += at
            if at < per_unit or found.blocks >= limit:
                break
        return found

    def claim(self, found: Match) -> Table:
        """Hold the matched blocks: out of the free queue, one reference more."""
        table = Table()
        for run, start, end in found.pieces:
            held = run
            if start > run.start:
                held = self._split(run, start)
            if end < held.start + held.length:
                self._split(held, end)
            if not held.refs:
                held.prev.next = held.next
                held.next.prev = held.prev
                self.free -= held.length
            held.refs += 1
            table.runs.append(held)
        table.full = found.blocks
        self._tables[table] = None
        return table

    # -- allocation --------------------------------------------------------------------------------------------------

    def take(self, blocks: int) -> None:
        """Pop `blocks` from the front of the free queue; cached ones lose their hash. The caller has checked `free`."""
        self.free -= blocks
        if blocks <= self._blank:
            self._blank -= blocks
            return
        blocks -= self._blank
        self._blank = 0
        queue = self._queue
        while blocks:
            run = queue.next
            gone = run.length if run.length < blocks else blocks
            if self.evictions is not None:
                last = run.start + run.length - 1
                self.evictions.extend((run.key, last - i) for i in range(gone))
            run.length -= gone
            blocks -= gone
            if not run.length:
                queue.next = run.next
                run.next.prev = queue
                self._forget(run)

    def fill(self, table: Table, chain: Sequence[int], full: int) -> None:
        """Blocks up to `full` are full now: give them their ids, so that others can hit them."""
        if not self.caching:
            return
        at, per_unit, known = table.full, self.per_unit, len(chain)
        runs = table.runs
        while at < full:
            unit, start = divmod(at, per_unit)
            if unit < known:
                key: int | None = chain[unit]
                length = min(per_unit - start, full - at)
            else:
                key, length = None, full - at  # an answer nobody will send back: hashed, never hit
            last = runs[-1] if runs else None
            if last is not None and last.refs == 1 and last.twin is None and self._continues(last, key, start):
                last.length += length
            else:
                run = Run(key, start, length, 1)
                runs.append(run)
                if key is not None:
                    self._enter(key, run)
            at += length
        table.full = at

    def release(self, table: Table, chain: Sequence[int], computed_tokens: int) -> None:
        """Give all blocks of a request back, tail first: finish, abort or preemption."""
        full, rest = divmod(computed_tokens, self.block_size)
        del self._tables[table]
        if not self.caching:
            self._blank += full + (rest > 0)
            self.free += full + (rest > 0)
            return
        self.fill(table, chain, full)
        if rest:
            self._blank += 1
            self.free += 1
        queue = self._queue
        for run in reversed(table.runs):
            run.refs -= 1
            if not run.refs:
                last = queue.prev
                run.prev, run.next = last, queue
                last.next = queue.prev = run
                self.free += run.length

    def reset(self) -> bool:
        """Forget everything cached. False, and nothing done, while any block is held."""
        if self.free != self.usable:
            return False
        self._index.clear()
        self._queue.next = self._queue.prev = self._queue
        self._blank = self.usable
        return True

    def cached(self, key: int) -> int:
        """Blocks of the unit `key` that a lookup could hit."""
        return self.match((key,), self.per_unit).blocks

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _continues(self, last: Run, key: int | None, start: int) -> bool:
        """Whether blocks from `start` may join `last`: not where the unit has copies, which are hit oldest first."""
        return key is not None and last.key == key and last.start + last.length == start and self._index[key] is last

    def _enter(self, key: int, run: Run) -> None:
        first = self._index.setdefault(key, run)
        if first is not run:
            while first.twin is not None:
                first = first.twin
            first.twin = run

    def _forget(self, run: Run) -> None:
        if run.key is None:
            return
        first = self._index[run.key]
        if first is run:
            if run.twin is None:
                del self._index[run.key]
            else:
                self._index[run.key] = run.twin
            return
        while first.twin is not run:
            assert first.twin is not None
            first = first.twin
        first.twin = run.twin

    def _split(self, run: Run, at: int) -> Run:
        """Cut a run so that its two parts can be held and freed apart; returns the part that starts at `at`."""
        tail = Run(run.key, at, run.start + run.length - at, run.refs)
        run.length = at - run.start
        tail.twin, run.twin = run.twin, tail
        if not run.refs:
            before = run.prev
            tail.prev, tail.next = before, run
            before.next = run.prev = tail
        else:
            for table in self._tables:
                if run in table.runs:
                    table.runs.insert(table.runs.index(run) + 1, tail)
        return tail


def coarsen(chain: Sequence[int], factor: int) -> tuple[int, ...]:
    """Ids of `factor` times larger units from a chained list: since ids are chained, the last one names its unit."""
    return tuple(chain[factor - 1 :: factor])
