"""Policies are chosen by name; a wrong name or setting says what would be right."""

from __future__ import annotations

from random import Random

import pytest

from policies import POLICIES, make
from policies.model import FleetView, Request


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_builds_with_defaults_and_survives_an_empty_fleet(name: str) -> None:
    policy = make(name, {}, Random(1))
    assert policy.name == name
    assert policy.choose(Request("r"), FleetView([]), 0.0).replica_id is None
    assert POLICIES[name].about


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"policy 'rond_robin' is unknown; known: .*round_robin"):
        make("rond_robin")


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="policy 'random' has no parameter 'sed'; accepted: none"):
        make("random", {"sed": 3})


def test_a_fraction_where_a_whole_number_is_wanted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policy 'chwbl': parameter 'characters' is 1.5; it must be a whole number"):
        make("chwbl", {"characters": 1.5})
