"""Which replica holds which prefix: an estimate from our own dispatches, corrected by what the engine reports.

One dict maps a chunk key to the set of replicas that hold it, as the bits of an int, so that one walk along a chain
answers for the whole fleet and its cost does not depend on how much is indexed. Recency is kept per replica over
*runs* (stretches of a chain that were last used together): using a chain moves its runs to the young end, the tail
first, so that the old end always holds a tail. Eviction takes from there: the least recently freed request first and
its tail first, as vLLM's block pool does. Capacity is num_gpu_blocks x block_size x bytes per token / 256, or
what feedback makes of it. What follows the last key of a chain (the partial chunk, the part beyond 128 KB,
the answer) has a length but no keys: it is *credited* to a later, longer chain that passes the same point.
Size, feedback and restarts bound the content, and age where others fill the same caches (`expire`): what they sent is
not in the size. About 100 bytes per chunk, and 8 more per replica holding it.
"""

from __future__ import annotations

from array import array
from bisect import insort
from typing import Final

_UNBOUNDED: Final = 1 << 62
NEAR: Final = 8  # chunks within which walking finds the end of a match sooner than halving
AT_ONCE: Final = 4_000  # chunks that expire in one call, and what is left of their run: a millisecond


class _Run:
    """A stretch of one chain on one replica, in the replica's list from old to young."""

    __slots__ = ("children", "credit", "keys", "newer", "older", "parent", "used_at")

    def __init__(self, keys: array[int], parent: _Run | None) -> None:
        self.keys = keys
        self.parent = parent
        self.children = 0
        self.credit = 0  # chunks known by length only, after the last key
        self.used_at = 0.0
        self.older: _Run = self
        self.newer: _Run = self


class _Holding:
    """What one replica is believed to hold."""

    __slots__ = ("bit", "capacity", "chunks", "firsts", "head")

    def __init__(self, bit: int, capacity: int | None) -> None:
        self.bit = bit
        self.capacity = _UNBOUNDED if capacity is None else capacity
        self.chunks = 0
        self.firsts: dict[int, _Run] = {}  # first key of a run -> run
        self.head = _Run(array("Q"), None)  # sentinel: head.newer is the oldest run, head.older the youngest


class PrefixIndex:
    """Chunks per replica; replicas are addressed by slot (`add` returns it) on the hot path, by id elsewhere."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._credits: dict[int, dict[int, int]] = {}  # last key of a chain -> slot -> credited chunks
        self._slots: dict[str, int] = {}
        self._holdings: list[_Holding | None] = []
        self._everybody = 0  # bits of the slots in use
        self._free: list[int] = []  # slots not in use, from removed replicas

    # -- membership ------------------------------------------------------------------------------------------------

    def add(self, replica_id: str, capacity_chunks: int | None = None) -> int:
        """Start an empty replica (None: capacity unknown, unbounded) and return its slot."""
        if replica_id in self._slots:
            raise ValueError(f"replica {replica_id!r} is already in the index; remove it first")
        slot = self._free.pop(0) if self._free else len(self._holdings)
        if slot == len(self._holdings):
            self._holdings.append(None)
        self._holdings[slot] = _Holding(1 << slot, capacity_chunks)
        self._slots[replica_id] = slot
        self._everybody |= 1 << slot
        return slot

    def slot(self, replica_id: str) -> int:
        return self._slots[replica_id]

    def remove(self, replica_id: str) -> None:
        """Forget a replica and all it held; its slot is used again."""
        self.clear(replica_id)
        slot = self._slots.pop(replica_id)
        self._holdings[slot] = None
        self._everybody &= ~(1 << slot)
        insort(self._free, slot)

    def clear(self, replica_id: str) -> None:
        """The replica restarted: it holds nothing. Its capacity stays."""
        slot = self._slots[replica_id]
        held = self._held(slot)
        for run in list(held.firsts.values()):
            self._set_credit(slot, held, run, 0)
            for key in run.keys:
                self._drop(key, held.bit)
        self._holdings[slot] = _Holding(held.bit, held.capacity)

    def resize(self, replica_id: str, capacity_chunks: int) -> None:
        """New capacity (at least one chunk); the oldest surplus is evicted at once."""
        slot = self._slots[replica_id]
        held = self._held(slot)
        held.capacity = max(1, capacity_chunks)
        self._evict(slot, held)

    def chunks(self, replica_id: str) -> int:
        """Chunks the replica is believed to hold, credited ones included."""
        return self._held(self._slots[replica_id]).chunks

    def capacity(self, replica_id: str) -> int | None:
        capacity = self._held(self._slots[replica_id]).capacity
        return None if capacity == _UNBOUNDED else capacity

    def __len__(self) -> int:
        """Distinct chunks held anywhere."""
        return len(self._holders)

    # -- matching --------------------------------------------------------------------------------------------------

    def depths(self, chain: tuple[int, ...], total_chunks: int = 0) -> list[int]:
        """Leading chunks of the chain held, per slot, -1 for a free slot.

        total_chunks: length of the request's stream in chunks where it exceeds the chain's; credit may reach that far.
        """
        holders, credits, alive = self._holders, self._credits, self._everybody
        depths: list[int] = []
        depth, size = 0, len(chain)
        while alive:  # who holds a chunk holds all before it, so where the next ones stop is found by halving
            high = size
            while high - depth > NEAR:
                middle = (depth + high) >> 1
                if holders.get(chain[middle], 0) & alive == alive:
                    depth = middle + 1
                else:
                    high = middle
            onwards = range(depth, size)
            for depth in onwards:
                still = holders.get(chain[depth], 0) & alive
                if still != alive:
                    break
            else:
                depth, still = size, 0
            stopped = alive ^ still
            if not depths:  # those that stop first are mostly the many: filled in at once, the others one by one
                depths = [depth] * len(self._holdings)
            else:
                left = stopped
                while left:
                    bit = left & -left
                    depths[bit.bit_length() - 1] = depth
                    left ^= bit
            if depth and (credited := credits.get(chain[depth - 1])) is not None:
                room = max(total_chunks, size) - depth
                for slot, credit in credited.items():
                    if stopped >> slot & 1:
                        depths[slot] = depth + min(room, credit)
            alive = still
            depth += 1
        if self._free:
            depths = depths or [-1] * len(self._holdings)
            for slot in self._free:
                depths[slot] = -1
        return depths

    def depth(self, replica_id: str, chain: tuple[int, ...]) -> int:
        """Leading chunks of the chain the replica holds, without credit."""
        return self._depth(1 << self._slots[replica_id], chain)

    def _depth(self, bit: int, chain: tuple[int, ...]) -> int:
        holders = self._holders
        low, high = 0, len(chain)
        if high and holders.get(chain[-1], 0) & bit:  # most asked about: a request that comes or ends
            return high
        while low < high:  # holding chunk j implies holding all before it
            middle = (low + high) // 2
            if holders.get(chain[middle], 0) & bit:
                low = middle + 1
            else:
                high = middle
        return low

    # -- recording -------------------------------------------------------------------------------------------------

    def insert(self, slot: int, chain: tuple[int, ...], credit: int = 0, now: float = 0.0) -> None:
        """The replica now holds this chain and `credit` chunks after it, and has used all of it `now`.

        Call at dispatch (siblings find each other before the engine confirms) and again when the request is finished
        (vLLM frees its blocks then), with the answer's length in the credit.
        """
        if not chain:
            return
        held = self._held(slot)
        bit, firsts = held.bit, held.firsts
        depth = self._depth(bit, chain)
        path: list[_Run] = []
        at = 0
        parent: _Run | None = None
        while at < depth:
            run = firsts[chain[at]]
            if len(run.keys) > depth - at:
                run = self._split(held, run, depth - at)
            path.append(run)
            parent = run
            at += len(run.keys)
        if depth < len(chain):
            fresh = array("Q", chain[depth:])
            if parent is not None and parent.children == 0:
                self._set_credit(slot, held, parent, 0)  # the credited part now has keys
                parent.keys.extend(fresh)
            else:
                run = firsts[fresh[0]] = _Run(fresh, parent)
                run.older = run.newer = run
                if parent is not None:
                    parent.children += 1
                path.append(run)
            holders = self._holders
            for key in chain[depth:]:
                others = holders.get(key)
                holders[key] = bit if others is None else others | bit  # `bit` itself: one object for all keys
            held.chunks += len(fresh)
        head = held.head
        for run in reversed(path):  # the tail first: it is the first to go
            run.older.newer, run.newer.older = run.newer, run.older
            young = head.older
            run.older, run.newer = young, head
            young.newer = head.older = run
            run.used_at = now
        if credit > path[-1].credit:
            self._set_credit(slot, held, path[-1], credit)
        if held.chunks > held.capacity:
            self._evict(slot, held)

    def forget(self, replica_id: str, chain: tuple[int, ...], keep: int) -> None:
        """Drop what the replica holds of this chain after its first `keep` chunks (a dispatch that never prefilled).

        Only the part no other chain continues is dropped.
        """
        slot = self._slots[replica_id]
        held = self._held(slot)
        depth = self._depth(held.bit, chain)
        at = 0
        path: list[tuple[int, _Run]] = []
        while at < depth:
            run = held.firsts[chain[at]]
            path.append((at, run))
            at += len(run.keys)
        for start, run in reversed(path):
            if run.children or start + len(run.keys) <= keep:
                return
            if start + len(run.keys) > depth:  # another chain's own tail continues inside this run
                return
            self._set_credit(slot, held, run, 0)
            self._shorten(held, run, max(0, keep - start))

    def expire(self, slot: int, before: float) -> None:
        """Drop what the replica was last given before that time; of very much a part, and the rest with later calls."""
        held = self._held(slot)
        least = held.chunks - AT_ONCE
        while (run := held.head.newer) is not held.head and run.used_at < before and held.chunks > least:
            self._set_credit(slot, held, run, 0)
            self._shorten(held, run, 0)

    # -- internals -------------------------------------------------------------------------------------------------

    def _held(self, slot: int) -> _Holding:
        held = self._holdings[slot]
        if held is None:
            raise KeyError(f"slot {slot} holds no replica")
        return held

    def _split(self, held: _Holding, run: _Run, at: int) -> _Run:
        """Cut a run before its at-th key; the old object keeps the tail and its place in the order."""
        front = _Run(run.keys[:at], run.parent)
        front.children = 1
        run.keys = run.keys[at:]
        run.parent = front
        held.firsts[front.keys[0]] = front
        held.firsts[run.keys[0]] = run
        front.older = front.newer = front
        return front

    def _set_credit(self, slot: int, held: _Holding, run: _Run, credit: int) -> None:
        if credit == run.credit:
            return
        held.chunks += credit - run.credit
        run.credit = credit
        key = run.keys[-1]
        if credit:
            self._credits.setdefault(key, {})[slot] = credit
        elif (slots := self._credits.get(key)) is not None:
            slots.pop(slot, None)
            if not slots:
                del self._credits[key]

    def _drop(self, key: int, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]

    def _shorten(self, held: _Holding, run: _Run, keep: int) -> None:
        first = run.keys[0]
        for key in run.keys[keep:]:
            self._drop(key, held.bit)
        held.chunks -= len(run.keys) - keep
        if keep:
            del run.keys[keep:]
            return
        del held.firsts[first]
        run.older.newer, run.newer.older = run.newer, run.older
        if run.parent is not None:
            run.parent.children -= 1

    def _evict(self, slot: int, held: _Holding) -> None:
        while held.chunks > held.capacity:
            run = held.head.newer  # the oldest, and a leaf: whoever used its children used it after them
            surplus = held.chunks - held.capacity
            if run.credit:
                self._set_credit(slot, held, run, max(0, run.credit - surplus))
            else:
                self._shorten(held, run, max(0, len(run.keys) - surplus))
