"""Gaps between uses of a prefix group, by hand."""

from __future__ import annotations

from loadtests.gaps import group_gaps
from loadtests.record import Record
from loadtests.schedule import Row


def test_gaps_are_those_of_the_group_behind_the_common_block() -> None:
    # everybody begins with block 7; groups 1 and 2 behind it
    rows = [Row(i, t, 1024, 5, (7, g)) for i, (t, g) in enumerate([(0.0, 1), (1.0, 2), (4.0, 1), (9.0, 2), (10.0, 1)])]
    records = []
    for row in rows:
        record = Record.of(row, True)
        record.scheduled_s = row.at_s
        records.append(record)
    found = group_gaps(rows, records)
    assert found["seconds"]["n"] == 3
    assert (found["seconds"]["p50"], found["seconds"]["max"]) == (6.0, 8.0)  # 4, 6 and 8 s
    assert found["prompt_tokens_between"]["p50"] == 1024.0


def test_later_turns_count_when_they_were_sent_and_not_otherwise() -> None:
    rows = [
        Row(0, 0.0, 64, 5, (1,), "s"),
        Row(1, None, 128, 5, (1, 2), "s", 1),
        Row(2, None, 192, 5, (1, 2, 3), "s", 2),
    ]
    records = [Record.of(row, True) for row in rows]
    records[0].scheduled_s, records[1].scheduled_s = 0.0, 30.0
    assert group_gaps(rows, records)["seconds"] == {
        "p50": 30.0, "p90": 30.0, "p95": 30.0, "p99": 30.0, "max": 30.0, "n": 1
    }  # fmt: skip
