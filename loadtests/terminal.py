"""Where commands print to. Rich takes a pipe or a file for 80 columns wide and cuts tables, which nobody can undo."""

from __future__ import annotations

import os
import sys

from rich.console import Console

PAPER_COLUMNS = 160


def console() -> Console:
    """As wide as the terminal, or as COLUMNS says, or as wide as any of our tables."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PAPER_COLUMNS)
