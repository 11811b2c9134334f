"""Replicas from a TOML file with [[replicas]] tables, looked at every `poll_s` seconds.

A file counts as it is when two looks in a row find the same inode, size and times, and still do after it was read: a
writer in the middle of its work is waited for, an atomic rename and the symlink swap of a mounted ConfigMap are seen.
An empty file is a half-written one; `replicas = []` says that there is none. A file with a mistake is refused whole.
Trade-off: a change takes one to two intervals; in return it needs nothing of the file system, so network mounts work.
"""

from __future__ import annotations

import asyncio
import os
import stat
import tomllib
from collections import Counter
from pathlib import Path
from typing import TypeAlias

from pydantic import ValidationError

from gateway.config import is_pem
from gateway.discovery.membership import Member
from gateway.discovery.report import Report, SourceError
from gateway.lost_cancel import told_to_end
from gateway.mistakes import lines_of
from gateway.sections import Replica, Table

MOST_BYTES = 16 * 1024 * 1024
Look: TypeAlias = tuple[int, ...]


class ReplicaFile(Table):
    replicas: list[Replica]


class WatchedFile:
    def __init__(self, path: str, poll_s: float) -> None:
        self.path = Path(path)
        self.poll_s = poll_s

    async def run(self, report: Report) -> None:
        before: Look | None = None
        taken: Look | None = None
        first = True
        while not told_to_end():
            try:
                look = await asyncio.to_thread(self._look)
                if look != taken and (first or look == before):
                    members = await asyncio.to_thread(self._read, look)
                    if members is not None:
                        report.told(members)
                        taken = look if look == before else None  # the very first read is checked once more
                        first = False
                if look == taken:
                    report.fine()
                before = look
            except SourceError as e:
                report.failed(str(e))
            await asyncio.sleep(self.poll_s)

    def _look(self) -> Look:
        try:
            s = os.stat(self.path)
        except OSError as e:
            raise SourceError(f"{self.path}: cannot be read: {e.strerror}") from None
        except ValueError as e:  # a zero byte in the path
            raise SourceError(f"{self.path}: cannot be read: {e}") from None
        if not stat.S_ISREG(s.st_mode) or s.st_size > MOST_BYTES:  # a pipe would never end, /dev/zero fill the memory
            raise SourceError(f"{self.path}: must be a file of at most {MOST_BYTES} bytes")
        return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns

    def _read(self, look: Look) -> list[Member] | None:
        """None: it changed while it was read. Raises SourceError."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except OSError as e:
            raise SourceError(f"{self.path}: cannot be read: {e.strerror}") from None
        except UnicodeDecodeError:
            raise SourceError(f"{self.path}: must be UTF-8 text") from None
        return members(text, self.path) if self._look() == look else None


def members(text: str, path: Path) -> list[Member]:
    """The replicas of a file's text. Raises SourceError."""
    if not text.strip():
        raise SourceError(f"{path}: is empty; `replicas = []` says that there is none")
    try:
        tables = ReplicaFile.model_validate(tomllib.loads(text)).replicas
    except ValidationError as e:
        raise SourceError(f"{path}: {'; '.join(lines_of(e, ReplicaFile))}") from None
    except (ValueError, RecursionError) as e:
        raise SourceError(f"{path}: not valid TOML: {e}") from None
    for name, times in Counter(table.name for table in tables).items():
        if times > 1:
            raise SourceError(f'{path}: id "{name}" is there twice; give one of them another id')
    for i, table in enumerate(tables):
        if table.ca_file is not None and not is_pem(table.ca_file):
            raise SourceError(f'{path}: replicas[{i}].ca_file = "{table.ca_file}": must be a readable PEM file')
    return [Member(table) for table in tables]
