"""Hypothesis without deadlines: a test must not fail because the machine was busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("forebay", deadline=None)
settings.load_profile("forebay")
