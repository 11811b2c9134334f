"""The document of log lines knows every warning and error that the gateway writes, and no line that it does not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "log-lines.md").read_text()
SHOWN = re.findall(r"`([^`]+)`", TEXT)
LOUD = ("warning", "error", "exception")


def formats(levels: tuple[str, ...]) -> Iterator[str]:
    """Format of each call of the log at one of these levels; `%s: %s` and the like say nothing by themselves."""
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
                continue
            of = call.func.value
            said = call.args[0]
            if isinstance(of, ast.Name) and of.id == "log" and call.func.attr in levels:
                assert isinstance(said, ast.Constant), f"{path.name}: a line whose text cannot be looked up"
                yield str(said.value)


def pattern(said: str) -> re.Pattern[str]:
    return re.compile(".+".join(re.escape(part) for part in re.split(r"(?:%[sdrg])+", said)) + ".*")


def test_every_warning_and_error_of_the_gateway_is_explained() -> None:
    plain = [said for said in formats(LOUD) if re.search(r"[a-z]{3}", re.sub(r"%[a-z]", "", said))]
    assert len(plain) > 40
    assert [said for said in plain if not any(pattern(said).fullmatch(line) for line in SHOWN)] == []


def test_every_line_that_is_explained_is_one_that_the_gateway_writes() -> None:
    known = [pattern(said) for said in formats((*LOUD, "info")) if said != "%s"]
    # lines that are put together before they are logged, by the module that has their text
    texts = "".join((ROOT / "gateway" / name).read_text() for name in ("discovery/membership.py", "watch.py"))
    rows = re.findall(r"^\| `([^`]+)` \|", re.split(r"^## A mistake", TEXT, flags=re.M)[0], re.M)
    lines = [row for row in rows if " " in row]
    assert len(lines) > 30
    for line in lines:
        ours = re.split(r"\b[A-Z][A-Z:]+\b", line)
        longest = max(ours, key=len).strip()
        assert any(one.fullmatch(line) for one in known) or longest in texts, line


def test_every_reason_of_an_ejection_is_explained() -> None:
    signs = re.findall(r'^    [A-Z_]+ = "(\w+)"', (ROOT / "gateway" / "signals.py").read_text(), re.M)
    told = set(signs) - {"ok", "client_error", "ours", "backpressure"}  # these eject nobody
    assert told - set(SHOWN) == set()
