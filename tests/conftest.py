"""Hypothesis without deadlines, since a machine may be busy; in CI the same examples each time, and no database.

Elsewhere examples are drawn anew, so that many runs search wider than one; a failure prints how to repeat it.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("forebay", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "forebay")
