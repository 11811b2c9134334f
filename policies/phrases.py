"""A prompt as a list of hashes of its phrases, so that two prompts can be compared after the text is gone.

Chunks of 256 bytes say where two prompts part; they cannot say what comes together again behind it, because one more
byte moves every later chunk. Phrases end where text ends them (line ends, punctuation before a space, about 256 bytes
at most), so the same sentence has the same hash wherever it stands. A tool is one phrase, hashed with its keys in
order; how it was spelled is a second hash. Hashes are seeded with a secret of the process and with the model, and
stand for at most the first 64 KB. Trade-off: about 50 us per KB, which is why only samples are cut (`families.py`), and
a phrase at a time where others wait (`cutting`).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from policies.canonical import KINDS

MOST_BYTES = 65_536
MOST_PHRASES = 2_048
SHORT, LEAST, LONG = 12, 64, 256  # bytes: a shorter one joins the next unless a line ends, a longer one is cut
_END = re.compile(rb"\n\s*|[.,;:!?]\s+|\xe3\x80\x82|\xef\xbc\x8c|\xef\xbc\x81|\xef\xbc\x9f")  # the last four: CJK
_SPACE = re.compile(rb"\s+")
_SKIPPED = frozenset({"model", "adapter", "role"})
_TOOLS = "tools"


@dataclass(slots=True)
class Phrases:
    """One prompt. Lists go by phrase; `starts` are offsets into the canonical stream (`canonical.py`)."""

    hashes: array[int] = field(default_factory=lambda: array("Q"))
    starts: array[int] = field(default_factory=lambda: array("I"))
    sizes: array[int] = field(default_factory=lambda: array("I"))  # bytes
    fields: array[int] = field(default_factory=lambda: array("H"))  # number of the field in the stream
    spelled: array[int] = field(default_factory=lambda: array("Q"))  # of tools the hash as sent, else as `hashes`
    tools: int = 0  # how many of the phrases are tools; they come first of all but options
    tools_at: int = 0  # number of the first of them

    def __len__(self) -> int:
        return len(self.hashes)

    def add(self, hashed: int, start: int, size: int, number: int, spelled: int | None = None) -> None:
        self.hashes.append(hashed)
        self.starts.append(start)
        self.sizes.append(size)
        self.fields.append(number)
        self.spelled.append(hashed if spelled is None else spelled)


def phrases(parts: Sequence[bytes], document: Mapping[str, Any], seed: int) -> Phrases:
    """Cuts the canonical `parts` of a request; `document` is the body they were made of, `seed` a secret."""
    made = Phrases()
    for _ in cutting(made, parts, document, seed):
        pass
    return made


def cutting(made: Phrases, parts: Sequence[bytes], document: Mapping[str, Any], seed: int) -> Iterator[None]:
    """The same into `made`, a phrase a step."""
    at = 0
    for number, (data, tag) in enumerate(zip(parts[::2], parts[1::2], strict=False)):
        kind = KINDS[tag[1]]
        if kind == "model" or kind == "adapter":
            seed = xxh3_64_intdigest(data, seed)
        elif kind == _TOOLS:
            yield from _tools(made, document.get("tools"), data, at, number, seed)
        elif kind not in _SKIPPED and data:
            yield from _text(made, data, at, number, seed)
        at += len(data) + len(tag)
        if at >= MOST_BYTES or len(made) >= MOST_PHRASES:
            break


def _text(made: Phrases, data: bytes, at: int, number: int, seed: int) -> Iterator[None]:
    begin, size = 0, min(len(data), MOST_BYTES)
    for end in _ends(data, size):
        if len(made) >= MOST_PHRASES:
            return
        piece = data[begin:end]
        made.add(xxh3_64_intdigest(piece, seed), at + begin, len(piece), number)
        begin = end
        yield


def _ends(data: bytes, size: int) -> Iterator[int]:
    """Where phrases of a text end."""
    last = 0
    for end, line in _marks(data, size):
        if end - last < SHORT and not line:
            continue
        while end - last > LONG and (cut := _inner(data, last + LEAST, min(end - SHORT, last + 2 * LONG))):
            yield cut
            last = cut
        yield end
        last = end


def _marks(data: bytes, size: int) -> Iterator[tuple[int, bool]]:
    """Where they may end, and whether a line does."""
    end = 0
    for mark in _END.finditer(data, 0, size):
        end = mark.end()
        yield end, data[mark.start()] == 10
    if not end or end < size:
        yield size, True


def _inner(data: bytes, begin: int, end: int) -> int:
    """Where a long phrase is cut: at a space chosen by the letters before it, so that both sides of a change agree."""
    for space in _SPACE.finditer(data, begin, end):
        if (5 * data[space.start() - 1] + data[space.start() - 2]) & 3 == 0:
            return space.end()
    return 0


def _tools(made: Phrases, tools: Any, data: bytes, at: int, number: int, seed: int) -> Iterator[None]:
    """One phrase per tool. `data` is the list as JSON, so a tool starts behind the bracket or comma before it."""
    if not isinstance(tools, list):
        yield from _text(made, data, at, number, seed)
        return
    made.tools_at = len(made)
    offset = at + 1
    for tool in tools[:MOST_PHRASES]:
        if isinstance(tool, dict):
            tool = {k: v for k, v in tool.items() if k != "cache_control"}
        try:
            sent, ordered = orjson.dumps(tool), orjson.dumps(tool, option=orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError:
            return
        hashed = xxh3_64_intdigest(ordered, seed)
        made.add(hashed, offset, len(sent) + 1, number, xxh3_64_intdigest(sent, seed))
        offset += len(sent) + 1
        yield
    made.tools = len(made) - made.tools_at
