"""Which Forebay runs."""

from __future__ import annotations

from importlib import metadata


def own_version() -> str:
    """Of the installed distribution."""
    try:
        return metadata.version("forebay")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "0+source"
