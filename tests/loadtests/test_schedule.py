"""The schedule file: who is counted, what its bytes are, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.schedule import (
    Recipe,
    Row,
    Schedule,
    ScheduleError,
    default_drain_s,
    expand,
    load,
    longest_on_time_s,
    resolve,
    runs,
)
from policies.model import ServiceClass
from policies.objectives import Objectives

CHAT = ServiceClass("interactive", ttft_s=2.0, ttft_s_per_token=0.00025, tpot_s=0.08)


def schedule(*rows: Row, window_s: float = 60.0, drain_s: float = 30.0) -> Schedule:
    return Schedule(rows, window_s, drain_s, 512, {"interactive": CHAT}, Recipe("literal", seed=7))


def row(id: int, at_s: float | None, **more: object) -> Row:
    return Row(id, at_s, 600, 10, (1, 100 + id), **more)  # type: ignore[arg-type]


def test_rows_before_the_window_and_after_it_are_sent_but_not_counted() -> None:
    s = schedule(row(0, -5.0), row(1, 0.0), row(2, 59.999), row(3, 60.0), row(4, 80.0))
    assert [r.id for r in s.cohort] == [1, 2]


def test_all_planned_turns_of_a_session_that_starts_in_the_window_are_counted() -> None:
    s = schedule(
        row(0, 59.0, session="a"),
        row(1, None, session="a", turn=1, think_s=30.0),
        row(2, None, session="a", turn=2, think_s=3000.0),
        row(3, 61.0, session="b"),
        row(4, None, session="b", turn=1, think_s=1.0),
    )
    assert [r.id for r in s.cohort] == [0, 1, 2]


def test_what_is_saved_is_what_is_loaded_and_the_hash_is_of_the_content(tmp_path: Path) -> None:
    s = schedule(row(0, 0.1234567891), row(1, 3.0, tenant="acme", adapter="fr"))
    plain, packed = tmp_path / "s.jsonl", tmp_path / "s.jsonl.gz"
    assert s.save(plain) == s.save(packed) == s.sha256
    assert load(plain).sha256 == load(packed).sha256 == s.sha256
    assert load(packed).rows[1] == s.rows[1]


def test_the_hash_is_the_same_on_every_machine() -> None:
    s = schedule(row(0, 0.5), row(1, 1.25))
    assert s.sha256 == "8bc10260dc44ec61ebb78ff447ce84f8867b6f060954bcb35e0d457a7599bc89"


def test_other_objectives_are_another_schedule() -> None:
    a = schedule(row(0, 0.5))
    b = Schedule(a.rows, 60.0, 30.0, 512, {"interactive": ServiceClass("interactive", tpot_s=0.1)}, a.recipe)
    assert a.sha256 != b.sha256


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    schedule(row(0, 0.5), row(1, 0.6)).save(path)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(ScheduleError, match="0 rows, the header says 2"):
        load(path)


def test_a_wrong_block_count_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"1 blocks of 512 tokens for 600 prompt tokens; 2 would be right"):
        schedule(Row(0, 0.0, 600, 10, (1,)))


def test_an_unknown_class_is_named() -> None:
    with pytest.raises(ScheduleError, match="'gold' is not one of: interactive"):
        schedule(row(0, 0.0, service_class="gold"))


def test_an_open_loop_row_needs_its_time() -> None:
    with pytest.raises(ScheduleError, match="at_s is missing"):
        schedule(row(0, None))


def test_objectives_grow_with_the_prompt() -> None:
    assert resolve(CHAT, 4000) == Objectives(3.0, 0.08, None, None)


@pytest.mark.parametrize(
    ("objectives", "output_tokens", "expected"),
    [
        (Objectives(2.0, 0.1), 11, 3.0),
        (Objectives(2.0, 0.1), 1, 2.0),
        (Objectives(2.0, 0.1, None, 2.5), 11, 2.5),
        (Objectives(2.0, None), 11, None),
        (Objectives(None, None, None, 60.0), 11, 60.0),
    ],
)
def test_the_longest_an_on_time_answer_may_take(objectives: Objectives, output_tokens: int, expected: float) -> None:
    found = longest_on_time_s(objectives, output_tokens)
    assert found == (pytest.approx(expected) if expected is not None else None)


def test_drain_is_that_of_the_longest_in_whole_seconds() -> None:
    assert default_drain_s([3.0, 12.2, None]) == 13.0
    with pytest.raises(ScheduleError, match="--drain"):
        default_drain_s([None])


def test_runs_shrink_consecutive_ids_and_come_back() -> None:
    assert runs((5, 6, 7, 8, 20, 21, 3)) == [[5, 4], 20, 21, 3]
    assert expand([[5, 4], 20, 21, 3]) == (5, 6, 7, 8, 20, 21, 3)
