"""What runs is told: by `forebay --version` and by `GET /admin/status`."""

from __future__ import annotations

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
