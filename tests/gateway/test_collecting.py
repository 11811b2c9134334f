"""The garbage collector has little to look at: what is kept of requests that ended is not followed where compiled."""

from __future__ import annotations

import gc

import pytest

from gateway import collecting
from gateway.record import Attempt, Tokens
from gateway.version import built
from policies.homes import _Heat
from policies.ledger import Charge
from policies.model import Alternative, Dispatch, Hold, Prediction, Shed, Usage
from policies.objectives import Objectives
from policies.working_set import Conversation

KEPT = [
    Tokens(),
    Attempt("r0", 0.0),
    Objectives(),
    Usage(),
    Prediction(),
    Alternative("r0", 0.0, 0, 0.0, None),
    Dispatch("1", "r0"),
    Hold("1", 0.0),
    Shed("1", "draining"),
    Charge(0.0, 0.0, 0.0, 0.0),
    _Heat(0.0),
    Conversation("a", 0),
]


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: type(kept).__name__)
def test_what_is_kept_of_a_request_is_not_followed(kept: object) -> None:
    assert gc.is_tracked(kept) is (built() == "plain Python")


def test_what_is_there_at_the_start_is_never_looked_at_again() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    there = [[]]
    try:
        collecting.settle()
        assert gc.get_threshold() == (5_000, 20, 50)
        assert gc.get_freeze_count() > frozen
        assert not any(one is there for one in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
