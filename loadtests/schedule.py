"""The schedule: what is asked for, when, by whom, made once before a run and used by every arm.

A row is a logical request. Open loop: `at_s` is fixed. Closed loop: the first turn of a session is open loop,
a later turn is scheduled at the end of the previous answer + `think_s`. Cohort: rows with 0 <= at_s < W, and all
planned turns of sessions that start there, so every arm has the same N. Rows from W to W + D keep the load on
and do not count. Block ids are chained: an equal id means that the whole prefix up to and including it is equal.
The sha256 covers the canonical lines of header and rows; runs whose hashes differ are not compared.
Trade-off: times are rounded to a microsecond so that the text is the same on any machine.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from policies.model import ServiceClass
from policies.objectives import Objectives

SCHEMA = "forebay.schedule/1"


class ScheduleError(ValueError):
    """A schedule that cannot be made or read; the text names the field, its value and what would be right."""


@dataclass(slots=True, frozen=True)
class Row:
    """One logical request. Times in seconds from the start of the window, lengths in tokens of the model."""

    id: int  # position in the schedule
    at_s: float | None  # scheduled time; None for a later turn of a closed-loop session
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # ceil(prompt_tokens / block_tokens) chained ids; the last block may be partial
    session: str | None = None
    turn: int = 0
    think_s: float = 0.0  # from the end of the previous turn to this one
    service_class: str = "interactive"
    tenant: str | None = None
    adapter: str | None = None


@dataclass(slots=True, frozen=True)
class Recipe:
    """How the schedule was made: enough to make it again."""

    workload: str  # a generator's name, or the format of the trace
    seed: int = 0
    load: float = 1.0  # multiple of the source's own rate
    source: str | None = None  # file name of the trace
    source_sha256: str | None = None
    offset_s: float = 0.0  # where in the source the window starts
    disjoint: bool = True  # this seed's piece of the source overlaps no other seed's
    notes: tuple[str, ...] = ()  # what the reader changed or had to invent: thinning, spreading, caps


@dataclass(frozen=True)
class Schedule:
    """Rows in order of scheduled time (later turns after their first), with what is needed to judge them."""

    rows: tuple[Row, ...]
    window_s: float
    drain_s: float
    block_tokens: int = 512  # tokens of one block id
    classes: Mapping[str, ServiceClass] = field(default_factory=dict)
    recipe: Recipe = field(default_factory=lambda: Recipe("rows"))

    def __post_init__(self) -> None:
        for row in self.rows:
            if row.service_class not in self.classes:
                known = ", ".join(sorted(self.classes)) or "none"
                raise ScheduleError(f"row {row.id}: service_class {row.service_class!r} is not one of: {known}")
            if row.at_s is None and (row.session is None or row.turn == 0):
                raise ScheduleError(f"row {row.id}: at_s is missing; only later turns of a session may leave it out")
            if len(row.blocks) != -(-row.prompt_tokens // self.block_tokens):
                raise ScheduleError(
                    f"row {row.id}: {len(row.blocks)} blocks of {self.block_tokens} tokens for {row.prompt_tokens} "
                    f"prompt tokens; {-(-row.prompt_tokens // self.block_tokens)} would be right"
                )

    @cached_property
    def sessions(self) -> dict[str, list[Row]]:
        """Closed-loop sessions: their rows in order of turn. Rows of open-loop sessions (all with `at_s`) count too."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            if row.session is not None:
                found.setdefault(row.session, []).append(row)
        for rows in found.values():
            rows.sort(key=lambda r: r.turn)
        return found

    @cached_property
    def cohort(self) -> tuple[Row, ...]:
        """The rows that are counted: the denominator of attainment, whatever happens to them."""
        return tuple(row for row in self.rows if 0.0 <= self.start_s(row) < self.window_s)

    def start_s(self, row: Row) -> float:
        """Scheduled time of the row, or of the first turn of its session for a later closed-loop turn."""
        if row.at_s is not None:
            return row.at_s
        first = self.sessions[row.session or ""][0]
        if first.at_s is None:
            raise ScheduleError(f"session {row.session!r}: its first turn has no at_s")
        return first.at_s

    def objectives(self, row: Row) -> Objectives:
        """The bounds of this row, resolved for its prompt length."""
        return resolve(self.classes[row.service_class], row.prompt_tokens)

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for line in self._lines():
            digest.update(line)
        return digest.hexdigest()

    def _lines(self) -> Iterator[bytes]:
        head = {
            "schema": SCHEMA,
            "window_s": self.window_s,
            "drain_s": self.drain_s,
            "block_tokens": self.block_tokens,
            "classes": {name: {f: getattr(c, f) for f in _CLASS} for name, c in sorted(self.classes.items())},
            "recipe": asdict(self.recipe),
            "rows": len(self.rows),
        }
        yield json.dumps(head, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        for row in self.rows:
            yield _line(row)

    def save(self, path: Path) -> str:
        """Write as JSON lines (gzip where the name ends in .gz, byte-reproducible) and return the sha256."""
        data = b"".join(self._lines())
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        return self.sha256


def load(path: Path) -> Schedule:
    """Read what `save` wrote. Raises ScheduleError naming the line that is wrong."""
    raw = path.read_bytes()
    lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines()
    try:
        head = json.loads(lines[0])
        if head.get("schema") != SCHEMA:
            raise ScheduleError(f"{path}: schema is {head.get('schema')!r}; {SCHEMA!r} would be right")
        classes = {name: ServiceClass(**c) for name, c in head["classes"].items()}
        recipe = Recipe(**{**head["recipe"], "notes": tuple(head["recipe"]["notes"])})
    except (IndexError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ScheduleError(f"{path}: line 1 is no schedule header ({error})") from error
    rows = []
    for number, line in enumerate(lines[1:], 2):
        try:
            rows.append(_row(json.loads(line)))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ScheduleError(f"{path}: line {number} is no schedule row ({error})") from error
    if len(rows) != head["rows"]:
        raise ScheduleError(f"{path}: {len(rows)} rows, the header says {head['rows']}; the file is cut")
    return Schedule(tuple(rows), head["window_s"], head["drain_s"], head["block_tokens"], classes, recipe)


def resolve(service_class: ServiceClass, prompt_tokens: int) -> Objectives:
    """Objectives of a class for one prompt length: TTFT = ttft_s + ttft_s_per_token x prompt tokens."""
    ttft = service_class.ttft_s
    if ttft is not None:
        ttft += service_class.ttft_s_per_token * prompt_tokens
    return Objectives(ttft, service_class.tpot_s, service_class.itl_s, service_class.e2e_s)


def longest_on_time_s(objectives: Objectives, output_tokens: int) -> float | None:
    """Longest time from schedule to end that an on-time answer of this length may take; None: nothing bounds it."""
    bound = objectives.e2e_s
    if objectives.ttft_s is not None and (objectives.tpot_s is not None or output_tokens <= 1):
        paced = objectives.ttft_s + max(0, output_tokens - 1) * (objectives.tpot_s or 0.0)
        bound = paced if bound is None else min(bound, paced)
    return bound


def default_drain_s(bounds: Iterable[float | None]) -> float:
    """D: the longest time an on-time request may take, rounded up to whole seconds so that it reads well."""
    known = [bound for bound in bounds if bound is not None]
    if not known:
        raise ScheduleError("drain: no objective bounds the time of a request; give --drain in seconds")
    longest = max(known)
    return float(int(longest) + (longest > int(longest)))


def runs(blocks: tuple[int, ...]) -> list[int | list[int]]:
    """Ids with consecutive stretches written as [first, count]; agentic prompts shrink about a hundredfold."""
    out: list[int | list[int]] = []
    i = 0
    while i < len(blocks):
        j = i + 1
        while j < len(blocks) and blocks[j] == blocks[j - 1] + 1:
            j += 1
        if j - i >= 3:
            out.append([blocks[i], j - i])
        else:
            out.extend(blocks[i:j])
        i = j
    return out


def expand(encoded: Iterable[int | list[int]]) -> tuple[int, ...]:
    """The reverse of `runs`."""
    out: list[int] = []
    for item in encoded:
        if isinstance(item, int):
            out.append(item)
        else:
            out.extend(range(item[0], item[0] + item[1]))
    return tuple(out)


# named one by one, so that a right added to ServiceClass later leaves the hash of old schedules alone
_CLASS = (
    "name", "ttft_s", "ttft_s_per_token", "tpot_s", "itl_s", "e2e_s",
    "weight", "floor_share", "sheddable", "max_wait_s", "fill_only", "engine_priority",
)  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "session": None, "turn": 0, "think_s": 0.0, "service_class": "interactive", "tenant": None, "adapter": None,
}  # fmt: skip


def _line(row: Row) -> bytes:
    value: dict[str, Any] = {
        "id": row.id,
        "at_s": None if row.at_s is None else round(row.at_s, 6),
        "prompt_tokens": row.prompt_tokens,
        "output_tokens": row.output_tokens,
        "blocks": runs(row.blocks),
    }
    for name, default in _DEFAULTS.items():
        held = getattr(row, name)
        if held != default:
            value[name] = round(held, 6) if isinstance(held, float) else held
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _row(value: dict[str, Any]) -> Row:
    return Row(**{**value, "blocks": expand(value["blocks"])})
