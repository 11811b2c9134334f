"""What stands where a prompt of a family parts from the one before it: kind, place, and the tokens it costs.

A value that changes is told apart by the words that differ from those that stood in the same place before, so the place
is exact to the byte. The loss of a request is what follows the split and was said before in that order; nothing, when
the request's own chain was known beyond the split (the same value was sent before). Only hashes of words are kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from policies.flow import Flow
from policies.phrases import Phrases
from policies.prefix import CHUNK_BYTES
from policies.splits import How, Split, splits
from policies.volatile import Leak, kind_of

if TYPE_CHECKING:
    from policies.families import Family, Sample

MOST_LEAKS = 16  # of one family
MOST_SLOTS = 32
MOST_VALUE_BYTES = 160  # a longer change is a text, whatever words are in it
MOST_GAP_BYTES = 4_096
_WORD = re.compile(rb"[^\s\"'<>(){}\[\],;=]+")


@dataclass(slots=True)
class LeakRow:
    """One place of one family. `flow`: requests that split here, tokens lost, and the variance of these, since of
    w requests that a sample stands for w - 1 were not looked at. It begins with the sample before the first split."""

    path: str
    start: int  # in the canonical stream
    offset: int  # bytes into the value at `path`
    chunk: int  # number of the 256-byte chunk of the stream
    flow: Flow
    votes: Counter[Leak] = field(default_factory=Counter)
    samples: int = 0
    around: str | None = None  # only when the operator switched samples on

    @property
    def kind(self) -> Leak:
        return self.votes.most_common(1)[0][0]


@dataclass(slots=True, frozen=True)
class _Place:
    kind: Leak
    start: int  # in the stream
    field: int
    tool: int | None = None  # which of the tools
    begin: int = 0  # where its value starts in the stream


def find(
    family: Family, sample: Sample, said_before: Callable[[Phrases, int], int], weight: int, now: float
) -> list[tuple[LeakRow, float]]:
    """The leaks that this sample shows, with the tokens they cost; counts them, `weight` times."""
    new = sample.phrases
    rows: list[tuple[LeakRow, float]] = []
    for split in splits(new, family.reference):
        place = _changed(family, sample, split) if split.how is How.VALUE else _ordered(new, split)
        if place is None or (split.how is How.VALUE and place.start < sample.known_bytes):
            continue
        lost = said_before(new, split.meets)
        if split.how is not How.VALUE:  # of an order that came before in part, the part is not lost
            region = range(split.at, split.meets)
            lost += sum(max(0, new.starts[k] + new.sizes[k] - max(new.starts[k], sample.known_bytes)) for k in region)
            if sample.known_bytes > new.starts[split.meets - 1]:
                continue
        path = sample.path(place.field, place.tool)
        key = (path, _before(new, split)) if split.how is How.VALUE else (split.how.value, 0)
        row = family.leaks.get(key)
        if row is None:
            if len(family.leaks) >= MOST_LEAKS:
                del family.leaks[min(family.leaks, key=lambda k: family.leaks[k].flow.sums[1])]
            row = family.leaks[key] = LeakRow(path, place.start, 0, 0, Flow(3, family.looked_at))
        if split.how is How.VALUE or place.start <= row.start:  # of an order the first place that ever changed
            row.path, row.start = path, place.start
            row.offset, row.chunk = place.start - place.begin, place.start // CHUNK_BYTES
        row.samples += 1
        row.votes[place.kind] += weight
        tokens = lost * sample.tokens_per_byte
        row.flow.add(now, weight, weight * tokens, weight * (weight - 1) * tokens**2)
        family.flow.add(now, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, weight * tokens)
        rows.append((row, weight * tokens))
    return rows


def _ordered(new: Phrases, split: Split) -> _Place:
    at = split.at
    number, start = new.fields[at], new.starts[at]
    in_tools = new.tools_at <= at < new.tools_at + new.tools
    if split.how is How.KEYS:
        return _Place(Leak.TOOL_KEYS, start, number, at - new.tools_at, start)
    return _Place(Leak.TOOL_ORDER if in_tools else Leak.EXAMPLE_ORDER, start, number, None, _begin(new, number))


def _changed(family: Family, sample: Sample, split: Split) -> _Place | None:
    """None: it cannot be told yet, since what stood there before is not known."""
    new, words = sample.phrases, list(_words(sample, split))
    hashes = tuple(xxh3_64_intdigest(word.data, sample.seed) for word in words)
    before = _before(new, split)
    known = family.slots.get(before)
    if len(family.slots) >= MOST_SLOTS and known is None:
        del family.slots[next(iter(family.slots))]
    family.slots[before] = hashes
    if known is None or known == hashes:
        return None
    first = _common(known, hashes)
    changed = words[first : len(words) - _common(known[first:][::-1], hashes[first:][::-1])]
    if not changed:  # something was left out
        at = min(split.at, len(new) - 1)
        return _Place(Leak.TEXT, new.starts[at], new.fields[at], None, _begin(new, new.fields[at]))
    start, number, at = changed[0].start, changed[0].field, changed[0].phrase
    in_tools = new.tools_at <= at < new.tools_at + new.tools
    tool, begin = (at - new.tools_at, new.starts[at]) if in_tools else (None, _begin(new, number))
    text = b" ".join([word.data for word in changed])
    if sample.salted(number):
        kind = Leak.CACHE_SALT
    elif len(text) > MOST_VALUE_BYTES:
        kind = Leak.TEXT
    else:
        kind = kind_of(text, sample.text(max(begin, start - 32), min(32, start - begin)))
    return _Place(kind, start, number, tool, begin)


@dataclass(slots=True, frozen=True)
class _Word:
    data: bytes
    start: int
    field: int
    phrase: int


def _words(sample: Sample, split: Split) -> Iterator[_Word]:
    """What stands in the gap, word by word."""
    new, left = sample.phrases, MOST_GAP_BYTES
    for at in range(split.at, split.meets):
        start = new.starts[at]
        data = sample.text(start, min(left, new.sizes[at]))
        left -= len(data)
        for match in _WORD.finditer(data):
            yield _Word(match[0], start + match.start(), new.fields[at], at)
        if left <= 0:
            return


def _begin(new: Phrases, number: int) -> int:
    """Where a field starts in the stream."""
    return new.starts[new.fields.index(number)]


def _before(new: Phrases, split: Split) -> int:
    """What stands before the gap: the name of the place as long as the text before it stays."""
    return new.hashes[split.at - 1] if split.at else 0


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count
