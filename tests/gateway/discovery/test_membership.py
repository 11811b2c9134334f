"""What sources say becomes the fleet: nothing is lost when a replica leaves, moves, or is not who it was."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from gateway.discovery.membership import CONFIGURATION, Member, Membership
from gateway.fleet import Fleet
from gateway.sections import Health, Replica
from policies.model import Added, Draining, Ejected, FleetEvent, Removed, Restarted, Returned, Scraped


def member(name: str, at: str = "", uid: str = "", ready: bool = True, **keys: Any) -> Member:
    table = Replica(url=f"http://{at or name}:8000", id=name, models=["llama"], **keys)
    return Member(table, uid, ready)


class Story:
    """A fleet, what is open on its replicas, a clock set by hand, and everything the core was told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.core: list[FleetEvent] = []
        self.open: dict[str, int] = {}
        self.changes = 0
        self.fleet = Fleet(Health(), self.core.append, clock=lambda: self.now)
        self.members = Membership(
            self.fleet, lambda r: self.open.get(r, 0), self._changed, environ={}, clock=self.clock
        )

    def clock(self) -> float:
        return self.now

    def _changed(self) -> None:
        self.changes += 1

    def told(self, *members: Member, source: str = "kubernetes") -> list[str]:
        return self.members.told(source, members)

    def heard(self) -> list[FleetEvent]:
        heard, self.core[:] = list(self.core), []
        return [e for e in heard if not isinstance(e, Ejected | Returned)]

    def scraped(self, replica_id: str, started_at: float | None = None, tokens: float | None = None) -> None:
        self.fleet.scraped(Scraped(replica_id, self.now, started_at=started_at, generation_tokens=tokens))


@pytest.fixture
async def story() -> Story:
    return Story()


async def test_members_come_and_go_and_saying_the_same_again_changes_nothing(story: Story) -> None:
    assert story.told(member("a"), member("b")) == [
        "replica a: added at http://a:8000 (kubernetes)",
        "replica b: added at http://b:8000 (kubernetes)",
    ]
    assert story.told(member("b"), member("a")) == []
    assert story.told(member("b")) == ["replica a: removed"]
    assert list(story.fleet.replicas) == ["b"]
    assert story.changes == 2


async def test_a_replica_with_open_requests_drains_and_is_forgotten_with_the_last(story: Story) -> None:
    story.told(member("a"), member("b"))
    story.heard()
    story.open["a"] = 1
    assert story.told(member("b")) == ["replica a: drains, then is removed"]
    assert story.heard() == [Draining("a")]
    assert not story.fleet.available("a")
    story.members.settle()
    assert "a" in story.fleet.replicas
    story.open["a"] = 0
    story.members.settle()
    assert story.heard() == [Removed("a")]
    assert (story.members.leaving, list(story.fleet.replicas)) == ({}, ["b"])


async def test_drained_requests_are_waited_for_by_itself(story: Story) -> None:
    story.told(member("a"))
    story.open["a"] = 1
    story.told()
    story.open["a"] = 0
    async with asyncio.timeout(60):
        while story.fleet.replicas:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_one_that_does_not_drain_is_forgotten_in_the_end(story: Story) -> None:
    story.members.drain_s = 60.0
    story.told(member("a"))
    story.open["a"] = 3
    story.told()
    story.now = 59.0
    story.members.settle()
    assert "a" in story.fleet.replicas
    story.now = 60.0
    story.members.settle()
    assert story.fleet.replicas == {}
    story.members.close()


async def test_the_last_one_of_a_model_goes_on_until_who_replaces_it_is_there(story: Story) -> None:
    story.told(member("old"))
    story.fleet.probed("old", None)
    story.heard()
    assert story.told(member("new")) == [
        "replica new: added at http://new:8000 (kubernetes)",
        "replica old: goes on until one that comes instead is there, then is removed",
    ]
    story.members.settle()
    assert story.fleet.available("old")
    story.fleet.probed("new", None)
    story.open["old"] = 1
    story.members.settle()
    assert (story.fleet.available("old"), story.fleet.available("new")) == (False, True)
    story.open["old"] = 0
    story.members.settle()
    assert list(story.fleet.replicas) == ["new"]


async def test_it_does_not_wait_for_ever_for_one_that_never_comes(story: Story) -> None:
    story.told(member("old"))
    story.fleet.probed("old", None)
    story.told(member("new"))
    story.now = 60.0
    story.members.settle()
    assert list(story.fleet.replicas) == ["new"]


async def test_one_that_comes_back_while_it_drains_goes_on_as_itself(story: Story) -> None:
    story.told(member("a", uid="1"))
    itself = story.fleet.replicas["a"]
    story.open["a"] = 1
    story.told()
    assert story.told(member("a", uid="1")) == ["replica a: is back before it was gone"]
    story.open["a"] = 0
    story.members.settle()
    assert story.fleet.replicas == {"a": itself}
    assert not itself.draining


# -- readiness ---------------------------------------------------------------------------------------------------


async def test_one_that_was_never_ready_is_not_there_and_one_that_is_no_more_gets_nothing_new(story: Story) -> None:
    assert story.told(member("a", ready=False)) == []
    story.told(member("a"))
    story.heard()
    assert story.told(member("a", ready=False)) == ["replica a: not ready: gets nothing new"]
    assert story.told(member("a")) == ["replica a: ready"]
    assert story.heard() == [Draining("a"), Draining("a", False)]


async def test_what_an_operator_drains_stays_drained_whatever_a_source_says(story: Story) -> None:
    story.told(member("a"))
    story.fleet.drain("a")
    story.heard()
    story.told(member("a", ready=False))
    story.told(member("a"))
    assert story.heard() == []
    assert story.fleet.replicas["a"].draining
    story.fleet.drain("a", False)
    assert story.heard() == [Draining("a", False)]


# -- identity ----------------------------------------------------------------------------------------------------


async def test_the_same_process_at_another_address_is_the_same_replica(story: Story) -> None:
    story.told(member("a", at="10.0.0.1", uid="1"))
    itself = story.fleet.replicas["a"]
    story.scraped("a", started_at=1000.5, tokens=90.0)
    story.heard()
    assert story.told(member("a", at="10.0.0.2", uid="1")) == [
        "replica a: moved from http://10.0.0.1:8000 to http://10.0.0.2:8000"
    ]
    story.scraped("a", started_at=1000.5, tokens=95.0)
    assert not any(isinstance(e, Restarted | Added | Removed) for e in story.heard())
    assert story.fleet.replicas == {"a": itself}
    assert itself.url == "http://10.0.0.2:8000"


@pytest.mark.parametrize(("before", "after"), [(1000.5, 2000.5), (None, 2000.5), (1000.5, None), (None, None)])
async def test_after_a_move_the_cache_counts_as_lost_unless_the_process_is_shown_to_be_the_same(
    story: Story, before: float | None, after: float | None
) -> None:
    story.told(member("a", at="10.0.0.1"))
    story.scraped("a", started_at=before, tokens=90.0)
    story.told(member("a", at="10.0.0.2"))
    story.heard()
    story.scraped("a", started_at=after, tokens=95.0)
    story.scraped("a", started_at=after, tokens=95.0)
    assert [e for e in story.heard() if not isinstance(e, Scraped)] == [Restarted("a")]


async def test_a_name_that_goes_to_another_pod_is_another_replica(story: Story) -> None:
    """A StatefulSet gives its names again."""
    story.told(member("vllm-0", at="10.0.0.1", uid="old"))
    before = story.fleet.replicas["vllm-0"]
    story.open["vllm-0"] = 2
    story.heard()
    lines = story.told(member("vllm-0", at="10.0.0.2", uid="new"))
    assert lines == [
        "replica vllm-0: replaced by another of that name",
        "replica vllm-0: added at http://10.0.0.2:8000 (kubernetes)",
    ]
    assert story.heard() == [Removed("vllm-0"), Added("vllm-0", models=frozenset({"llama"}))]
    assert story.fleet.replicas["vllm-0"] is not before


async def test_weight_changes_in_place_and_a_change_of_models_makes_it_anew(story: Story) -> None:
    story.told(member("a"))
    story.heard()
    assert story.told(member("a", weight=2.0)) == ["replica a: weight 2, role both"]
    assert story.heard() == [Added("a", models=frozenset({"llama"}), weight=2.0)]
    before = story.fleet.replicas["a"]
    story.told(Member(Replica(url="http://a:8000", id="a", models=["qwen"])))
    assert story.fleet.replicas["a"] is not before


# -- several sources ---------------------------------------------------------------------------------------------


async def test_one_address_is_one_replica_whoever_names_it(story: Story, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    story.told(member("a", at="10.0.0.1"), source=CONFIGURATION)
    story.told(member("pod-x", at="10.0.0.1", uid="1"), member("b"))
    assert list(story.fleet.replicas) == ["a", "b"]
    story.told(member("pod-x", at="10.0.0.1", uid="1"), member("b"))
    assert caplog.text.count("replica pod-x: is at http://10.0.0.1:8000, as a is; taken for one replica") == 1


async def test_the_first_source_that_names_an_id_decides_and_the_next_takes_over(story: Story) -> None:
    story.told(member("a", at="10.0.0.1"), source="file")
    story.told(member("a", at="10.0.0.9"))
    assert story.fleet.replicas["a"].url == "http://10.0.0.1:8000"
    story.told(source="file")
    assert story.fleet.replicas["a"].url == "http://10.0.0.9:8000"
    assert story.members.origin == {"a": "kubernetes"}


async def test_replicas_of_a_first_answer_are_not_eased_in_and_later_ones_are(story: Story) -> None:
    story.members.slow_start_s = 10.0
    story.told(member("a"))
    story.told(member("a"), member("b"))
    assert [r.slow_start_s for r in story.fleet.replicas.values()] == [0.0, 10.0]


async def test_a_replica_whose_key_breaks_heads_is_left_out_and_the_others_serve(
    story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    story.members.environ = {"GOOD": "sk-good", "BROKEN": "sk-secret\n"}
    good, broken = member("a", key_env="GOOD"), member("b", key_env="BROKEN")
    story.told(good, broken, source="file")
    story.told(good, broken, source="file")
    assert list(story.fleet.replicas) == ["a"]
    (line,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert line.startswith('replica b: file names it, and it is left out; key_env = "BROKEN": the value of this')
    assert "sk-secret" not in caplog.text
    story.members.environ = {"GOOD": "sk-good", "BROKEN": "sk-mended"}
    assert story.told(good, broken, source="file") == ["replica b: added at http://b:8000 (file)"]
