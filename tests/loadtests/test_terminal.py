"""What a command prints into a file keeps its tables whole."""

from __future__ import annotations

import io

import pytest

from loadtests import terminal


def test_a_file_is_wide_enough_for_every_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert terminal.console().width == 160


def test_who_says_how_wide_it_is_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert terminal.console().width == 72
