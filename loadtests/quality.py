"""A user's own check of answers, reported beside goodput and never mixed into it.

Goodput here is latency-qualified: it says nothing about what was answered. `--check FILE.py:function` names a function
`check(answer: str, row: dict) -> bool` that is called after the run on each kept answer, or on a seeded share of them;
the share that passed is printed with its Wilson interval. The function runs in this process with full rights:
it is the operator's own file. An exception in it counts as not passed and is reported by type.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtests.record import Record
from policies.statistics import wilson

Check = Callable[[str, dict[str, Any]], bool]


class CheckError(ValueError):
    """A check that cannot be loaded; the text says what would be right."""


def load(name: str) -> Check:
    """The function named `FILE.py:function`."""
    file, colon, function = name.rpartition(":")
    path = Path(file)
    if not colon or not function.isidentifier():
        raise CheckError(f"--check {name!r}: FILE.py:function would be right")
    spec = importlib.util.spec_from_file_location("forebay_answer_check", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise CheckError(f"--check {name!r}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise CheckError(f"--check {name!r}: {path} has no function {function!r}")
    check: Check = found
    return check


def judge(check: Check, records: Sequence[Record]) -> dict[str, Any]:
    """Checked answers of the cohort and how many passed; complete answers whose text was kept."""
    passed, errors = 0, Counter[str]()
    kept = [r for r in records if r.counted and r.complete and r.text is not None]
    for record in kept:
        row = record.to_json()
        text = row.pop("text")
        try:
            passed += bool(check(text, row))
        except Exception as error:
            errors[type(error).__name__] += 1
    share = wilson(passed, len(kept))
    return {"checked": len(kept), "passed": passed, "share": asdict(share), "errors": dict(errors)}
