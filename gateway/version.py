"""Which Forebay runs, and whether its hot modules are compiled (`deploy/compile.py`) or plain Python."""

from __future__ import annotations

from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec


def own_version() -> str:
    """Of the installed distribution."""
    try:
        return metadata.version("forebay")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "0+source"


def built() -> str:
    """`compiled` or `plain Python`; all hot modules are the one or the other, so one of them tells."""
    found = find_spec("policies.ledger")
    native = found is not None and found.origin is not None and found.origin.endswith(tuple(EXTENSION_SUFFIXES))
    return "compiled" if native else "plain Python"
