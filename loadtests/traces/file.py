"""The bytes of a trace file: read once, unpacked, hashed as they lie on the disk."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from loadtests.schedule import Row, ScheduleError


@dataclass(frozen=True)
class Trace:
    """A file's name, text and the sha256 of its bytes (compressed, where it is)."""

    path: Path
    text: str
    sha256: str

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def head(self) -> str:
        """The first line."""
        return self.text.partition("\n")[0].strip()

    @cached_property
    def head_object(self) -> dict[str, Any]:
        """The first line as a JSON object; empty where it is none."""
        try:
            value = json.loads(self.head)
        except json.JSONDecodeError:
            return {}
        return value if isinstance(value, dict) else {}

    def objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Line number and JSON object of every line that is not empty."""
        for number, line in enumerate(self.text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise self.wrong(number, f"no JSON ({error})") from error
            if not isinstance(value, dict):
                raise self.wrong(number, f"a JSON {type(value).__name__}; an object would be right")
            yield number, value

    def table(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Line number and fields by column name of a CSV file with a header."""
        return enumerate(csv.DictReader(io.StringIO(self.text, newline="")), 2)

    def wrong(self, line: int, what: str) -> ScheduleError:
        return ScheduleError(f"{self.path}: line {line}: {what}")

    def whole(self, line: int, field: str, value: Any, least: int = 0) -> int:
        """A field that must be a whole number of at least `least`."""
        try:
            number = int(value)
        except (TypeError, ValueError):
            raise self.wrong(line, f"{field} is {value!r}; a whole number would be right") from None
        if number < least:
            raise self.wrong(line, f"{field} is {number}; at least {least} would be right")
        return number

    def real(self, line: int, field: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self.wrong(line, f"{field} is {value!r}; a number would be right") from None


def open_trace(path: Path) -> Trace:
    """Read a plain or gzipped file. Raises ScheduleError when it cannot be read or is empty."""
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        text = data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ScheduleError(f"trace {path}: cannot be read ({error})") from error
    if not text.strip():
        raise ScheduleError(f"trace {path}: is empty; at least one request would be right")
    return Trace(path, text, hashlib.sha256(raw).hexdigest())


def unshared(number: int, prompt_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """Blocks that nothing else has, as one run of consecutive ids: prompts of a trace without prefix identity."""
    base = (1 << 62) + (number << 24)
    return tuple(range(base, base + -(-prompt_tokens // block_tokens)))


def rebased(rows: list[Row]) -> tuple[tuple[Row, ...], float]:
    """Rows in order of time from the first row, and the time of the last one. Later turns keep their place."""
    timed = sorted((r for r in rows if r.at_s is not None), key=lambda r: r.at_s or 0.0)
    if not timed:
        return tuple(rows), 0.0
    start = timed[0].at_s or 0.0
    later = [r for r in rows if r.at_s is None]
    moved = [replace(r, at_s=(r.at_s or 0.0) - start) for r in timed]
    return (*moved, *later), moved[-1].at_s or 0.0
