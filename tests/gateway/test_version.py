"""What runs is told: by `forebay --version` and by `GET /admin/status`."""

from __future__ import annotations

import os
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec

import pytest

from gateway import version


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        ("/somewhere/policies/ledger.py", "plain Python"),
        (f"/somewhere/policies/ledger{EXTENSION_SUFFIXES[0]}", "compiled"),
        (None, "plain Python"),
    ],
)
def test_a_module_that_came_from_an_extension_is_compiled(
    origin: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "find_spec", lambda name: ModuleSpec(name, None, origin=origin))
    assert version.built() == told


def test_what_is_tested_is_what_was_meant_to_be() -> None:
    """`make compiled` runs these tests against extensions; a path in the wrong order would test the sources again."""
    assert version.built() == os.environ.get("FOREBAY_BUILT", "plain Python")
