"""What a configuration needs of the machine that it is for: variables that are set, places for journal and sockets.

`forebay check` says what is missing before anybody depends on it; a gateway finds out as it takes each into use, and of
some only in the log. Trade-off: a check on another machine than the gateway's needs its variables too.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from gateway.config import Config, ConfigError
from gateway.replica import key_mistakes
from gateway.tenants import Tenants


def lacking(config: Config, environ: Mapping[str, str] = os.environ) -> list[str]:
    """One line for each thing that is not as it should be: key, value, and what would be right."""
    lines: list[str] = []
    try:
        Tenants.of(config, environ)
    except ConfigError as e:
        lines += e.lines
    lines += [
        f'{key} = "{variable}": this environment variable is not set'
        for key, variable in _variables(config)
        if not environ.get(variable)
    ]
    lines += key_mistakes(config.replicas, environ)
    return lines + no_place(config)


def no_place(config: Config) -> list[str]:
    """What a core would die of, and be started again and again: a line for each place that it may not write to."""
    return [said for said in (_no_journal(config), _no_folder(config)) if said is not None]


def _no_journal(config: Config) -> str | None:
    """A line where the journal has no place; None where it has one, or is off."""
    path = config.journal.path
    said = _no_file(Path(path)) if path else None
    return None if said is None else f'journal.path = "{path}": {said}'


def _no_folder(config: Config) -> str | None:
    """A line where several processes have no place for the socket they meet at, as in a read-only container."""
    if config.workers.count == 1:
        return None
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        said = "its processes meet at a socket in a temporary folder, and none may be written to"
        return f"workers.count = {config.workers.count}: {said}; mount a tmpfs at /tmp, or name a folder in TMPDIR"
    return None


def _variables(config: Config) -> Iterator[tuple[str, str]]:
    """Keys that name one, with its name, where it may not stay unset: somebody asked for what it protects or opens."""
    for i, replica in enumerate(config.replicas):
        if replica.key_env:
            yield f"replicas[{i}].key_env", replica.key_env
    if config.metrics.token_env:
        yield "metrics.token_env", config.metrics.token_env
    for name, variable in config.admin.tokens_env.items():
        yield f"admin.tokens_env.{name}", variable
    for key in ("user_env", "password_env"):
        if variable := getattr(config.redis, key):
            yield f"redis.{key}", variable


def _no_file(path: Path) -> str | None:
    """Why nothing can be appended there."""
    if path.is_dir():
        return "is a folder; the path of a file would be right"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}; make it, or name a file in one that is there"
    there = path if path.exists() else path.parent
    if not os.access(there, os.W_OK):
        if os.statvfs(there).f_flag & os.ST_RDONLY:
            return "lies on a file system that is read-only; mount a volume there"
        return "may not be written by this user"
    return None
