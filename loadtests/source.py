"""Where schedules are cut from: a recorded trace (finite) or a generator (as long as wanted), in their own time.

A load multiplies the source's own rate: load x (W + D) seconds of the source become W + D seconds of schedule.
Deadlines and think times are the user's and stay. A seed chooses the offset (seed k takes the k-th block of that
length while whole blocks last, then overlapping pieces at golden-ratio offsets, and says so) and spreads the
rows of a quantised tick uniformly over it, in their order. Thinning keeps or drops whole prefix groups:
dropping single requests would delete reuse. A run that needs more trace than there is is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from loadtests.schedule import Recipe, Row, Schedule, ScheduleError, default_drain_s, longest_on_time_s, resolve
from loadtests.seeds import Stream, mix
from policies.model import ServiceClass

_GOLDEN_RATIO = 0.6180339887498949


@dataclass(frozen=True)
class Source:
    """A recorded trace. `at_s` of its rows is source time from 0, ascending; later turns have None."""

    name: str
    rows: tuple[Row, ...]
    span_s: float
    block_tokens: int
    tick_s: float = 0.0  # resolution of the timestamps where they are coarser than a second
    file: str | None = None
    sha256: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def rate_rps(self) -> float:
        return len(self.rows) / self.span_s

    def longest_s(self, classes: Mapping[str, ServiceClass]) -> float:
        return default_drain_s(
            longest_on_time_s(resolve(_class(classes, r), r.prompt_tokens), r.output_tokens) for r in self.rows
        )

    def cut(
        self, seed: int, load: float, window_s: float, drain_s: float, classes: Mapping[str, ServiceClass]
    ) -> Schedule:
        """The schedule of one run. Raises ScheduleError when load x (W + D) seconds are more than the trace has."""
        need = load * (window_s + drain_s)
        self.check(load, window_s, drain_s)
        whole = int(self.span_s / need + 1e-9)
        if seed < whole:
            offset = seed * need
        else:
            offset = (seed * _GOLDEN_RATIO) % 1.0 * (self.span_s - need)
        rows = _spread(self.rows, self.tick_s, seed) if self.tick_s else self.rows
        kept, sessions = [], set()
        for row in rows:
            if row.at_s is None:
                if row.session in sessions:
                    kept.append(row)
            elif offset <= row.at_s < offset + need:
                kept.append(replace(row, at_s=round((row.at_s - offset) / load, 6)))
                if row.session is not None:
                    sessions.add(row.session)
        if not kept:
            raise ScheduleError(
                f"window: no request of {self.file or self.name} falls into the {need:g} s from {offset:g} s; "
                "a longer window or another seed would be right"
            )
        notes = self.notes
        if self.tick_s:
            notes += (f"timestamps of {self.tick_s:g} s resolution spread uniformly, seeded",)
        recipe = Recipe(self.name, seed, load, self.file, self.sha256, round(offset, 6), seed < whole, notes)
        return Schedule(number(kept), window_s, drain_s, self.block_tokens, dict(classes), recipe)

    def check(self, load: float, window_s: float, drain_s: float) -> None:
        need = load * (window_s + drain_s)
        if need <= self.span_s + 1e-9:
            return
        fits = int(self.span_s / load - drain_s)
        where = self.file or self.name
        room = f"the largest window that fits is {fits} s" if fits > 0 else f"no window fits with drain {drain_s:g} s"
        raise ScheduleError(
            f"window: load {load:g} x (window {window_s:g} s + drain {drain_s:g} s) needs {need:g} s of trace, "
            f"{where} has {self.span_s:g} s; {room}"
        )


@dataclass(frozen=True)
class Generator:
    """A made workload: rows for [0, span) at its own rate, for any span. `longest` bounds what it may make."""

    name: str
    make: Callable[[int, float], Sequence[Row]]  # seed, span_s -> rows, ascending; later turns have at_s None
    longest: tuple[tuple[str, int, int], ...]  # service class, prompt tokens, output tokens
    block_tokens: int = 64
    about: str = ""  # one line for --help
    file: str | None = None
    sha256: str | None = None
    notes: tuple[str, ...] = ()

    def longest_s(self, classes: Mapping[str, ServiceClass]) -> float:
        return default_drain_s(longest_on_time_s(resolve(classes[c], p), n) for c, p, n in self.longest)

    def check(self, load: float, window_s: float, drain_s: float) -> None:
        return None

    def cut(
        self, seed: int, load: float, window_s: float, drain_s: float, classes: Mapping[str, ServiceClass]
    ) -> Schedule:
        rows = [
            row if row.at_s is None else replace(row, at_s=round(row.at_s / load, 6))
            for row in self.make(seed, load * (window_s + drain_s))
        ]
        recipe = Recipe(self.name, seed, load, self.file, self.sha256, notes=self.notes)
        return Schedule(number(rows), window_s, drain_s, self.block_tokens, dict(classes), recipe)


def number(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows with ids by position: by time, the later turns of a closed-loop session behind its first."""
    first: dict[str, float] = {}
    for row in rows:
        if row.at_s is not None and row.session is not None:
            first.setdefault(row.session, row.at_s)
    keyed = sorted(
        enumerate(rows),
        key=lambda e: (e[1].at_s if e[1].at_s is not None else first[e[1].session or ""], e[1].turn, e[0]),
    )
    return tuple(replace(row, id=i) for i, (_, row) in enumerate(keyed))


def shared_block(rows: Sequence[Row]) -> int | None:
    """The first block that more than half of all prompts begin with (a common system prompt); None without one."""
    firsts: dict[int, int] = {}
    for row in rows:
        if row.blocks:
            firsts[row.blocks[0]] = firsts.get(row.blocks[0], 0) + 1
    common = max(firsts, key=lambda b: firsts[b], default=None)
    return common if common is not None and firsts[common] > len(rows) / 2 else None


def group_of(row: Row, shared: int | None) -> int:
    """The prefix group of a row: its first block that is not the one everybody shares; its session where it has one."""
    if row.session is not None:
        return mix(*row.session.encode())
    if len(row.blocks) > 1 and row.blocks[0] == shared:
        return row.blocks[1]
    return row.blocks[0] if row.blocks else -1 - row.id


def thin(source: Source, share: float, seed: int = 0) -> Source:
    """Keep this share of the prefix groups, whole."""
    if not 0.0 < share <= 1.0:
        raise ScheduleError(f"thin: {share:g}; a share above 0 and up to 1 would be right")
    shared = shared_block(source.rows)
    bound = int(share * 2**63)
    kept = tuple(row for row in source.rows if mix(seed, group_of(row, shared)) < bound)
    note = f"thinned to {share:g} of the prefix groups, seed {seed}: {len(kept)} of {len(source.rows)} rows"
    return replace(source, rows=kept, notes=(*source.notes, note))


def cap_prompts(source: Source, longest: int) -> Source:
    """Drop rows with longer prompts; a closed-loop session ends before its first one (a front cut would kill reuse)."""
    ended: dict[str, int] = {}
    for row in source.rows:
        if row.session is not None and row.prompt_tokens > longest:
            ended[row.session] = min(row.turn, ended.get(row.session, row.turn))
    kept = tuple(
        row
        for row in source.rows
        if (row.prompt_tokens <= longest if row.session is None else row.turn < ended.get(row.session, row.turn + 1))
    )
    note = f"prompts above {longest} tokens left out: {len(kept)} of {len(source.rows)} rows stay"
    return replace(source, rows=kept, notes=(*source.notes, note))


def cap_sessions(source: Source, think_s: float = math.inf, turns: int | None = None) -> Source:
    """Think times cut to `think_s`, sessions to their first `turns`; rows without a session stay as they are."""
    kept = tuple(
        replace(row, think_s=min(row.think_s, think_s))
        for row in source.rows
        if row.session is None or turns is None or row.turn < turns
    )
    cut = [f"think times at most {think_s:g} s"] if think_s < math.inf else []
    cut += [f"at most {turns} turns"] if turns is not None else []
    note = f"sessions cut: {', '.join(cut)}; {len(kept)} of {len(source.rows)} rows stay"
    return replace(source, rows=kept, notes=(*source.notes, note))


def _class(classes: Mapping[str, ServiceClass], row: Row) -> ServiceClass:
    found = classes.get(row.service_class)
    if found is None:
        raise ScheduleError(
            f"service class {row.service_class!r} is not one of: {', '.join(sorted(classes))}; "
            "--config gateway.toml brings the classes of a gateway's own"
        )
    return found


def _spread(rows: tuple[Row, ...], tick_s: float, seed: int) -> tuple[Row, ...]:
    """Each tick's rows at sorted uniform times inside it, in their order."""
    out: list[Row] = []
    i = 0
    while i < len(rows):
        j = i
        while j < len(rows) and rows[j].at_s == rows[i].at_s:
            j += 1
        at = rows[i].at_s
        if at is None:
            out.append(rows[i])
            i += 1
            continue
        stream = Stream(mix(seed, round(at * 1e6)), "tick")
        times = sorted(stream.uniform(0.0, tick_s) for _ in range(i, j))
        out.extend(replace(row, at_s=at + t) for row, t in zip(rows[i:j], times, strict=True))
        i = j
    return tuple(out)
