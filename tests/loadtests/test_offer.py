"""What a command line offers, and what it says when it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.offer import classes_of, offer, with_objective
from loadtests.schedule import ScheduleError
from loadtests.workloads import CLASSES


def test_what_only_traces_know_is_refused_for_a_generated_workload_and_only_what_was_given_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"^--longest-prompt: for traces only, and chat is generated"):
        offer("chat", None, window_s=10.0, drain_s=None, objectives=(), form=None, longest_prompt=4000)


def test_an_objective_replaces_the_bounds_of_every_class_that_has_them() -> None:
    classes = with_objective(CLASSES, "ttft=1.5s+0.5ms/token,tpot=80ms")
    changed = classes["interactive"]
    assert (changed.ttft_s, changed.ttft_s_per_token, changed.tpot_s) == (1.5, 0.0005, 0.08)
    assert classes["batch"].ttft_s is None
    assert classes["batch"].e2e_s == CLASSES["batch"].e2e_s


def test_a_named_class_alone() -> None:
    classes = with_objective(CLASSES, "batch:e2e=10m")
    assert classes["batch"].e2e_s == 600.0
    assert classes["interactive"] == CLASSES["interactive"]


def test_none_removes_a_bound_and_itl_may_be_added() -> None:
    classes = with_objective(CLASSES, "interactive:tpot=none,itl=2s")
    assert (classes["interactive"].tpot_s, classes["interactive"].itl_s) == (None, 2.0)


@pytest.mark.parametrize(("text", "says"), [
    ("ttft=2", "'2' is no time; like 2s or 80ms would be right"),
    ("speed=2s", "'speed=2s' is no bound"),
    ("ttft=2s+1ms", "should end in /token"),
    ("tpot=1s+1ms/token", "only ttft grows"),
    ("gold:ttft=2s", "class 'gold' is none of batch, interactive, standard"),
])  # fmt: skip
def test_a_wrong_objective_is_named(text: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        with_objective(CLASSES, text)


def test_a_workload_is_cut_to_the_window_with_a_drain_of_its_own() -> None:
    made = offer("unique", None, window_s=20.0)
    schedule = made.schedule(seed=1, load=2.0)
    assert schedule.window_s == 20.0
    assert schedule.drain_s == made.drain_s > 0
    assert all(row.at_s is not None and row.at_s < 20.0 + made.drain_s for row in schedule.rows)


@pytest.mark.parametrize(("arguments", "says"), [
    ({"workload": None, "trace": None}, "either --workload NAME or --trace FILE"),
    ({"workload": "unique", "trace": Path("x")}, "either"),
    ({"workload": "uniq", "trace": None}, "--workload 'uniq': one of chat"),
    ({"workload": "unique", "trace": None, "window_s": 0.0}, "--window 0"),
    ({"workload": "unique", "trace": None, "drain_s": -1.0}, "--drain -1"),
    ({"workload": "unique", "trace": None, "thin_to": 0.5}, "--thin"),
    ({"workload": None, "trace": Path("/nowhere")}, "cannot be read"),
])  # fmt: skip
def test_a_wrong_option_is_named(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        offer(**{"window_s": 10.0, **arguments})  # type: ignore[arg-type]


def test_the_classes_of_a_gateway_come_from_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text("[classes.silver]\nttft_s = 3.0\n[[replicas]]\nurl = 'http://127.0.0.1:8001'\n")
    found = classes_of(file)
    assert found is not None
    assert found["silver"].ttft_s == 3.0
    assert classes_of(None) is None
