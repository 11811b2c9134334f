"""What an operator may write after --policy."""

from __future__ import annotations

import pytest

from policies import arms


def switches(text: str) -> tuple[str, bool, bool, bool]:
    arm = arms.parse(text)
    return arm.policy, arm.settings.admission, arm.settings.pacing, arm.settings.working_set


def test_forebay_means_everything() -> None:
    assert switches("forebay") == ("forebay", True, True, True)


def test_a_bare_baseline_is_dispatched_at_once() -> None:
    assert switches("round_robin") == ("round_robin", False, False, False)


def test_suffixes_add_one_part_each() -> None:
    assert switches("least_work+admission") == ("least_work", True, False, False)
    assert switches("least_work+pacing+admission") == ("least_work", True, True, False)
    assert switches("forebay+admission") == ("forebay", True, False, False)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("forebay+speed", "unknown suffix 'speed'; it should be one of admission, pacing"),
        ("lmetric+pacing+pacing", "suffix 'pacing' is given twice"),
        ("+pacing", "has no policy name"),
    ],
)
def test_a_wrong_arm_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
        arms.parse(text)
