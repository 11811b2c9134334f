"""The rules of the tree: dependencies point one way, policies stay pure, no file outgrows one noun."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PURE_PACKAGES = {"policies", "uhashring", "xxhash", "mypy_extensions"}  # the last: marks for the compiler
PURE_STDLIB = {
    "__future__", "abc", "array", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq",
    "itertools", "math", "operator", "random", "re", "statistics", "struct", "typing", "types", "unicodedata",
}  # fmt: skip
MAY_IMPORT = {"policies": {"policies"}, "gateway": {"gateway", "policies"}}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", modules("policies"), ids=lambda p: p.name)
def test_policies_import_nothing_impure(path: Path) -> None:
    # numpy and orjson are pure computation; everything else must be on the list above
    assert imported(path) - PURE_STDLIB - PURE_PACKAGES - {"numpy", "orjson"} == set()


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_dependencies_point_one_way(package: str) -> None:
    ours = {"policies", "gateway", "loadtests", "tests"}
    for path in modules(package):
        assert imported(path) & ours <= MAY_IMPORT[package], path


def test_no_file_outgrows_one_noun() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for package in ("policies", "gateway", "loadtests", "tests")
        for p in modules(package)
        if (n := len(p.read_text().splitlines())) > 400
    }
    assert long == {}
