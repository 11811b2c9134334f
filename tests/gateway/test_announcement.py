"""What two gateways know becomes what both know, in whatever order they hear of each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.announcement import Announcement, joined, read
from gateway.experiment_table import Experiment

ARMS = [{"name": "control"}, {"name": "new"}, {"name": "third"}]


def table(**keys: Any) -> Experiment:
    return Experiment.model_validate({"name": "x", "arms": ARMS, **keys})


def told(**fields: Any) -> Announcement:
    plain = Announcement("one", table(), 100.0, (1.0, 1.0, 1.0), 0.0, 0.0, {}, None, "")
    return replace(plain, **fields)


@st.composite
def announcements(draw: st.DrawFn) -> Announcement:
    """Of one experiment, as it may have gone on at gateways that were apart."""
    weighed = draw(st.sampled_from([0.0, 110.0, 120.0]))
    stopped = draw(st.dictionaries(st.sampled_from(["new", "third"]), st.sampled_from(["slow", "bad"])))
    ended = draw(st.sampled_from([None, 130.0, 140.0]))
    return told(
        weights=(1.0, 1.0 + weighed, 1.0),
        weighed_unix=weighed,
        moved_unix=draw(st.sampled_from([weighed, 125.0])),
        stopped=stopped,
        ended_unix=ended,
        ended_why="" if ended is None else "enough",
    )


@given(announcements(), announcements(), announcements())
def test_the_order_in_which_gateways_hear_of_each_other_does_not_matter(
    a: Announcement, b: Announcement, c: Announcement
) -> None:
    assert joined(a, a) == a
    assert joined(a, b) == joined(b, a)
    assert joined(joined(a, b), c) == joined(a, joined(b, c))
    assert joined(joined(a, b), b) == joined(a, b)


def test_stops_and_ends_add_up_and_the_last_weighing_holds() -> None:
    one = told(stopped={"new": "slow"}, moved_unix=150.0)
    two = told(weights=(2.0, 1.0, 1.0), weighed_unix=140.0, moved_unix=140.0, ended_unix=160.0, ended_why="enough")
    both = joined(one, two)
    assert (both.weights, both.moved_unix, both.stopped) == ((2.0, 1.0, 1.0), 150.0, {"new": "slow"})
    assert (both.ended_unix, both.ended_why) == (160.0, "enough")


def test_two_starts_of_one_table_are_one_experiment_from_the_first_on() -> None:
    late = told(id="two", started_unix=105.0, stopped={"new": "slow"})
    both = joined(late, told())
    assert (both.id, both.started_unix, both.stopped) == ("one", 100.0, {"new": "slow"})


def test_of_two_experiments_the_one_that_was_started_last_runs() -> None:
    other = told(id="two", table=table(seed=9), started_unix=105.0)
    assert joined(told(), other) is other
    assert joined(other, told()) is other


def test_the_same_table_started_again_after_its_end_is_another_experiment() -> None:
    ended, again = told(ended_unix=160.0, ended_why="enough"), told(id="two", started_unix=170.0)
    assert joined(ended, again) is again


def test_it_is_read_as_it_was_written() -> None:
    full = told(stopped={"new": "slow"}, weighed_unix=140.0, moved_unix=150.0, ended_unix=160.0, ended_why="enough")
    assert read(orjson.loads(orjson.dumps(full.document()))) == full
