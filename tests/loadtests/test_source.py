"""From a source to a schedule: windows, seeds, loads, thinning, and what is refused."""

from __future__ import annotations

import pytest

from loadtests.schedule import Row, ScheduleError
from loadtests.source import Source, cap_prompts, cap_sessions, thin
from loadtests.workloads import CLASSES

C = {"interactive": CLASSES["interactive"]}


def source(count: int = 100, gap_s: float = 1.0, tick_s: float = 0.0) -> Source:
    rows = tuple(Row(0, i * gap_s, 600, 11, (7, 1000 + i)) for i in range(count))
    return Source("literal", rows, count * gap_s, 512, tick_s)


def test_a_load_squeezes_time_and_leaves_lengths_alone() -> None:
    plain, double = source().cut(0, 1.0, 20.0, 10.0, C), source().cut(0, 2.0, 20.0, 10.0, C)
    assert [r.at_s for r in plain.rows[:3]] == [0.0, 1.0, 2.0]
    assert [r.at_s for r in double.rows[:3]] == [0.0, 0.5, 1.0]
    assert (len(plain.cohort), len(double.cohort)) == (20, 40)
    assert plain.objectives(plain.rows[0]) == double.objectives(double.rows[0])


def test_load_goes_on_through_the_drain_with_rows_that_do_not_count() -> None:
    cut = source().cut(0, 1.0, 20.0, 10.0, C)
    assert (len(cut.rows), len(cut.cohort)) == (30, 20)


def test_seeds_take_disjoint_pieces_while_there_are_any() -> None:
    cuts = [source().cut(seed, 1.0, 20.0, 10.0, C) for seed in range(4)]
    assert [c.recipe.offset_s for c in cuts[:3]] == [0.0, 30.0, 60.0]
    assert [c.recipe.disjoint for c in cuts] == [True, True, True, False]
    ids = [{r.blocks[1] for r in c.rows} for c in cuts]
    assert ids[0].isdisjoint(ids[1] | ids[2])
    assert cuts[3].recipe.offset_s <= 70.0


def test_a_run_that_needs_more_trace_than_there_is_names_the_largest_window() -> None:
    with pytest.raises(ScheduleError, match=r"load 2 x \(window 50 s \+ drain 10 s\) needs 120 s .* fits is 40 s"):
        source().cut(0, 2.0, 50.0, 10.0, C)
    source().cut(0, 2.0, 40.0, 10.0, C)


def test_when_no_window_fits_it_says_so() -> None:
    with pytest.raises(ScheduleError, match="no window fits with drain 60 s"):
        source().cut(0, 2.0, 1.0, 60.0, C)


def test_drain_is_the_longest_an_on_time_request_may_take() -> None:
    # 2 s + 600 x 0.25 ms + 10 x 100 ms = 3.15 s, in whole seconds 4
    assert source().longest_s(C) == 4.0


def test_ticks_are_spread_in_order_by_the_seed_and_stay_inside() -> None:
    rows = tuple(Row(0, 3.0 * (i // 5), 600, 11, (7, 1000 + i)) for i in range(50))
    quantised = Source("literal", rows, 30.0, 512, 3.0)
    one, again, other = (quantised.cut(s, 1.0, 20.0, 10.0, C) for s in (0, 0, 1))
    assert one.rows == again.rows
    assert [r.at_s for r in one.rows] != [r.at_s for r in other.rows]
    assert [r.blocks[1] for r in one.rows] == [1000 + i for i in range(50)]  # row order kept
    assert all(3.0 * (i // 5) <= (r.at_s or 0.0) < 3.0 * (i // 5) + 3.0 for i, r in enumerate(one.rows))
    assert len({r.at_s for r in one.rows}) == 50


def groups_of_four() -> Source:
    rows = tuple(Row(0, float(i), 1024, 11, (7, 100 + i // 4)) for i in range(400))
    return Source("literal", rows, 400.0, 512)


def test_thinning_keeps_whole_prefix_groups() -> None:
    kept = thin(groups_of_four(), 0.3)
    sizes = {b: sum(r.blocks[1] == b for r in kept.rows) for b in {r.blocks[1] for r in kept.rows}}
    assert set(sizes.values()) == {4}
    assert 0.15 < len(kept.rows) / 400 < 0.45
    assert "thinned to 0.3 of the prefix groups" in kept.notes[-1]


def test_thinning_leaves_reuse_where_dropping_single_requests_would_not() -> None:
    def reuse(rows: tuple[Row, ...]) -> float:
        seen: set[int] = set()
        hits = 0
        for row in rows:
            hits += row.blocks[1] in seen
            seen.add(row.blocks[1])
        return hits / len(rows)

    whole = groups_of_four()
    assert reuse(thin(whole, 0.3).rows) == reuse(whole.rows) == 0.75
    assert reuse(whole.rows[::4]) == 0.0


def test_a_share_of_zero_is_refused() -> None:
    with pytest.raises(ScheduleError, match="above 0 and up to 1"):
        thin(groups_of_four(), 0.0)


def test_a_capped_session_ends_before_its_first_long_prompt() -> None:
    turns = [
        Row(0, 0.0 if t == 0 else None, n, 5, tuple(range(-(-n // 512))), "s", t)
        for t, n in enumerate((600, 5000, 700))
    ]
    kept = cap_prompts(Source("literal", tuple(turns), 10.0, 512), 1000)
    assert [r.prompt_tokens for r in kept.rows] == [600]


def test_later_turns_follow_their_session_into_the_window() -> None:
    rows = (
        Row(0, 0.0, 600, 5, (1, 2), "a"), Row(0, None, 700, 5, (1, 3), "a", 1, 2.0),
        Row(0, 50.0, 600, 5, (4, 5), "b"), Row(0, None, 700, 5, (4, 6), "b", 1, 2.0),
    )  # fmt: skip
    cut = Source("literal", rows, 100.0, 512).cut(0, 1.0, 20.0, 10.0, C)
    assert [(r.session, r.turn, r.at_s) for r in cut.rows] == [("a", 0, 0.0), ("a", 1, None)]
    assert len(cut.cohort) == 2


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no request of literal falls into"):
        Source("literal", (Row(0, 90.0, 600, 5, (1, 2)),), 100.0, 512).cut(0, 1.0, 20.0, 10.0, C)


def test_sessions_are_cut_to_their_first_turns_and_pauses_to_the_longest_allowed() -> None:
    rows = tuple(Row(i, 0.0 if i == 0 else None, 64, 1, (i,), session="s", turn=i, think_s=20.0 * i) for i in range(4))
    source = cap_sessions(Source("made", rows, 100.0, 64), think_s=30.0, turns=3)
    assert [(r.turn, r.think_s) for r in source.rows] == [(0, 0.0), (1, 20.0), (2, 30.0)]
    assert source.notes == ("sessions cut: think times at most 30 s, at most 3 turns; 3 of 4 rows stay",)


def test_a_class_of_the_gateways_own_says_where_it_comes_from() -> None:
    with pytest.raises(ScheduleError) as refused:
        Source("journal", (Row(0, 0.0, 600, 11, (7, 8), service_class="silver"),), 1.0, 512).longest_s(C)
    assert str(refused.value) == (
        "service class 'silver' is not one of: interactive; --config gateway.toml brings the classes of a gateway's own"
    )
