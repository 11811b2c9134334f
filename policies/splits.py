"""Where two prompts of one family part, and whether they come together again behind it.

Both are lists of phrases (`phrases.py`). A place where they differ and *meet again* for at least 192 bytes is a split:
what stands behind it could have been shared, had the changing part stood later. Where they never meet again, the shared
part simply ends. Phrases that both have in another order are a shuffle; tools that agree but for the order of their
keys were spelled differently. Trade-off: greedy, left to right, gaps of at most 256 phrases; a text that was rewritten
all over is no split but a different text.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from policies.phrases import Phrases

MEETS_BYTES = 192
MOST_GAP = 256  # phrases on either side
ALIKE = 0.85  # share of bytes that two windows must have in common to be the same in another order


class How(Enum):
    VALUE = "value"  # something else stands there
    ORDER = "order"  # the same, in another order
    KEYS = "keys"  # the same tool, its JSON written in another order


@dataclass(slots=True, frozen=True)
class Split:
    """Phrases [at, meets) of the one prompt stand where the other has [other_at, other_meets)."""

    how: How
    at: int
    meets: int
    other_at: int
    other_meets: int


def splits(new: Phrases, old: Phrases) -> Iterator[Split]:
    """From the front to the back; ends where the two part for good."""
    a, b, i, j = new.hashes, old.hashes, 0, 0
    where: defaultdict[int, list[int]] = defaultdict(list)
    for index, value in enumerate(b):
        where[value].append(index)
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            if new.spelled[i] != old.spelled[j]:
                end, other = _same_tools(new, old, i, j)
                yield Split(How.KEYS, i, end, j, other)
                i, j = end, other
            else:
                i, j = i + 1, j + 1
            continue
        size = _shuffled(new, old, i, j)
        if size is not None:
            yield Split(How.ORDER, i, i + size[0], j, j + size[1])
            i, j = i + size[0], j + size[1]
            continue
        met = _meeting(new, old, i, j, where)
        if met is None:
            return
        yield Split(How.VALUE, i, met[0], j, met[1])
        i, j = met


def _same_tools(new: Phrases, old: Phrases, i: int, j: int) -> tuple[int, int]:
    """Past the tools that agree but for spelling."""
    end = new.tools_at + new.tools
    while i < end and j < len(old) and new.hashes[i] == old.hashes[j]:
        i, j = i + 1, j + 1
    return i, j


def _shuffled(new: Phrases, old: Phrases, i: int, j: int) -> tuple[int, int] | None:
    """How many phrases from here on are the same on both sides in another order."""
    ours, theirs = set(new.hashes[i : i + 2 * MOST_GAP]), set(old.hashes[j : j + 2 * MOST_GAP])
    if new.hashes[i] not in theirs or old.hashes[j] not in ours:
        return None
    count, other = _known_run(new.hashes, i, theirs), _known_run(old.hashes, j, ours)
    if new.tools and i < new.tools_at + new.tools and j < old.tools_at + old.tools:
        count, other = new.tools_at + new.tools - i, old.tools_at + old.tools - j  # tools are shuffled among themselves
    mine, his = Counter(new.hashes[i : i + count]), Counter(old.hashes[j : j + other])
    sizes = dict(zip(new.hashes[i : i + count], new.sizes[i : i + count], strict=True))
    common = sum(sizes[value] * n for value, n in (mine & his).items())
    longer = max(sum(new.sizes[i : i + count]), sum(old.sizes[j : j + other]))
    if common < ALIKE * longer or common < MEETS_BYTES:
        return None
    while count > 1 and other > 1 and new.hashes[i + count - 1] == old.hashes[j + other - 1]:
        count, other = count - 1, other - 1  # what is in order at the end is not shuffled
    return count, other


def _known_run(hashes: array[int], begin: int, known: set[int]) -> int:
    """Phrases from `begin` on that are known, with single strangers among them."""
    last, strangers = begin, 0
    for index in range(begin, min(len(hashes), begin + 2 * MOST_GAP)):
        if hashes[index] in known:
            last, strangers = index, 0
        else:
            strangers += 1
            if strangers > 1:
                break
    return last + 1 - begin


def _meeting(new: Phrases, old: Phrases, i: int, j: int, where: defaultdict[int, list[int]]) -> tuple[int, int] | None:
    """The nearest place behind (i, j) from which both say the same for a while."""
    for index in range(i, min(len(new), i + MOST_GAP)):
        places = where.get(new.hashes[index])
        if not places:
            continue
        for other in places[bisect_left(places, j) : bisect_left(places, j) + 4]:
            if other - j > MOST_GAP:
                break
            if _says_the_same(new, old, index, other):
                return index, other
    return None


def _says_the_same(new: Phrases, old: Phrases, index: int, other: int) -> bool:
    size = 0
    while index < len(new) and other < len(old) and new.hashes[index] == old.hashes[other]:
        size += new.sizes[index]
        if size >= MEETS_BYTES:
            return True
        index, other = index + 1, other + 1
    return False
