"""Which Forebay runs: the version of the distribution, and whether its hot modules are compiled (deploy/compile.py)."""

from __future__ import annotations

from importlib import metadata

from policies import core

COMPILED = not (core.__file__ or "").endswith(".py")


def own_version() -> str:
    """As 0.1.0, or 0.1.0+compiled: a local version in the words of PEP 440."""
    try:
        found = metadata.version("forebay")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        found = "0+source"
    if not COMPILED:
        return found
    return f"{found}.compiled" if "+" in found else f"{found}+compiled"
