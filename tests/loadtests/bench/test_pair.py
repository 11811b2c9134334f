"""Two runs on equal seeds are told apart by their pairs, and runs that are no pairs are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.bench import pair


def written(folder: Path, goodput: list[float], cached: list[float], sha: str = "a") -> Path:
    folder.mkdir()
    runs = [
        {"policy": "forebay", "load": 1.0, "seed": seed, "goodput_rps": g, "reuse": {"achieved": c},
         "schedule_sha256": f"{sha}{seed}"}
        for seed, (g, c) in enumerate(zip(goodput, cached, strict=True))
    ]  # fmt: skip
    (folder / "summary.json").write_text(json.dumps({"runs": runs}))
    return folder


def test_each_seed_is_its_own_reference(tmp_path: Path) -> None:
    """Seeds differ by far more than the set-ups: unpaired, nothing could be said."""
    one = written(tmp_path / "one", [1.0, 2.0, 3.0, 4.0], [0.5, 0.5, 0.5, 0.5])
    two = written(tmp_path / "two", [0.9, 1.9, 2.9, 3.9], [0.5, 0.48, 0.52, 0.5])
    assert pair.lines(one, two) == [
        "forebay, load 1, 4 seeds, goodput /s: 2.5 -> 2.4, -4.0 % [-4.0, -4.0]",
        "forebay, load 1, 4 seeds, cached share: 0.5 -> 0.5, +0.0 % [-5.2, +5.2]",
    ]


def test_other_seeds_and_other_schedules_are_no_pairs(tmp_path: Path) -> None:
    one = written(tmp_path / "one", [1.0, 2.0], [0.5, 0.5])
    with pytest.raises(ValueError, match="have not run the same"):
        pair.lines(one, written(tmp_path / "three", [1.0, 2.0, 3.0], [0.5, 0.5, 0.5]))
    with pytest.raises(ValueError, match="schedules differ"):
        pair.lines(one, written(tmp_path / "other", [1.0, 2.0], [0.5, 0.5], sha="b"))
