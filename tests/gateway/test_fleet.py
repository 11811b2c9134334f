"""What the fleet tells the core and the data path as replicas come, change and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from gateway.fleet import Fleet, Target
from gateway.replica import Replica
from gateway.sections import Health
from gateway.sections import Replica as ReplicaTable
from gateway.signals import Sign
from policies.model import Added, Draining, Ejected, FleetEvent, Removed, Restarted, Returned, Scraped


def rows(*names: str, **adapters: str) -> list[Mapping[str, Any]]:
    base = [{"id": n, "object": "model", "parent": None, "max_model_len": 8192} for n in names]
    return [*base, *({"id": n, "object": "model", "parent": p} for n, p in adapters.items())]


class Story:
    """A fleet with a clock that is set by hand, and everything it told the core."""

    def __init__(self, **health: object) -> None:
        self.now = 0.0
        self.told: list[FleetEvent] = []
        self.open: dict[str, int] = {}
        table = Health.model_validate(health)
        self.fleet = Fleet(table, self.told.append, lambda r: self.open.get(r, 0), lambda: self.now)

    def add(self, name: str, *models: str) -> Replica:
        replica = Replica(name, f"http://{name}:8000", fixed_models=models, models={}, learnt=False)
        self.fleet.add(replica)
        return replica

    def heard(self) -> list[FleetEvent]:
        heard, self.told[:] = list(self.told), []
        return heard


def test_a_replica_enters_the_core_once_its_models_are_known() -> None:
    s = Story()
    s.add("a")
    assert s.heard() == []
    s.fleet.learn("a", rows("llama", lora="llama"))
    s.fleet.probed("a", None)
    assert s.heard() == [
        Added("a", models=frozenset({"llama"}), adapters=frozenset({"lora"})),
        Ejected("a", "starting"),
        Returned("a"),
    ]
    assert s.fleet.available("a")


def test_configured_models_need_no_learning() -> None:
    s = Story()
    table = ReplicaTable(url="http://10.0.0.7:8000", models=["llama"], weight=2.0, key_env="KEY")
    replica = Replica.of(table, {"KEY": "sk-secret"})
    s.fleet.add(replica)
    assert s.heard() == [
        Added("10.0.0.7:8000", models=frozenset({"llama"}), weight=2.0),
        Ejected("10.0.0.7:8000", "starting"),
    ]
    assert replica.key == "sk-secret"
    assert "sk-secret" not in repr(replica)


def test_models_beyond_the_configured_ones_are_not_served_but_their_adapters_are() -> None:
    replica = Replica("a", "http://a", fixed_models=("llama",))
    assert replica.learn(rows("llama", "other", lora="llama", stray="other"))
    assert sorted(replica.models) == ["llama", "lora"]


def test_an_adapter_that_appears_is_told_and_nothing_is_told_when_nothing_changed() -> None:
    s = Story()
    s.add("a")
    s.fleet.learn("a", rows("llama"))
    s.fleet.probed("a", None)
    s.heard()
    s.fleet.learn("a", rows("llama"))
    assert s.heard() == []
    s.fleet.learn("a", rows("llama", lora="llama"))
    assert s.heard() == [Added("a", models=frozenset({"llama"}), adapters=frozenset({"lora"}))]


def test_a_model_name_means_a_base_model_or_an_adapter_of_one() -> None:
    s = Story()
    s.add("a")
    assert not s.fleet.complete  # it may turn out to serve anything
    s.fleet.learn("a", rows("llama", lora="llama"))
    assert s.fleet.resolve("llama") == Target("llama")
    assert s.fleet.resolve("lora") == Target("llama", "lora")
    assert s.fleet.resolve("typo") is None
    assert s.fleet.complete


def test_a_model_stays_known_after_its_last_replica_went() -> None:
    s = Story()
    s.add("a")
    s.fleet.learn("a", rows("llama"))
    s.add("b")
    s.fleet.learn("b", rows("qwen"))
    s.fleet.remove("a")
    assert s.fleet.resolve("llama") == Target("llama")
    assert s.fleet.serving("llama") == []


def test_an_adapter_that_its_last_replica_unloads_is_unknown_again() -> None:
    s = Story()
    s.add("a")
    s.add("b")
    s.fleet.learn("a", rows("llama", lora="llama"))
    s.fleet.learn("b", rows("llama", lora="llama"))
    s.fleet.learn("a", rows("llama"))
    assert s.fleet.resolve("lora") == Target("llama", "lora")  # b has it
    s.fleet.learn("b", rows("llama"))
    assert s.fleet.resolve("lora") is None
    assert s.fleet.resolve("llama") == Target("llama")
    s.fleet.learn("b", rows("llama", lora="llama"))
    s.fleet.remove("b")
    assert s.fleet.resolve("lora") == Target("llama", "lora")  # its replica is gone, not the adapter: 503


def test_the_merged_list_names_each_model_once_and_follows_changes() -> None:
    s = Story()
    s.add("a")
    s.add("b")
    s.fleet.learn("a", rows("llama"))
    s.fleet.learn("b", rows("llama", "qwen"))
    merged = orjson.loads(s.fleet.models_document())
    assert [m["id"] for m in merged["data"]] == ["llama", "qwen"]
    assert merged["data"][0]["max_model_len"] == 8192
    s.fleet.remove("b")
    assert [m["id"] for m in orjson.loads(s.fleet.models_document())["data"]] == ["llama"]


def test_draining_by_hand_is_told_and_taken_back() -> None:
    s = Story()
    s.add("a")
    s.fleet.learn("a", rows("llama"))
    s.fleet.probed("a", None)
    s.heard()
    s.fleet.drain("a")
    assert (s.heard(), s.fleet.available("a")) == ([Draining("a", True)], False)
    s.fleet.drain("a", False)
    assert (s.heard(), s.fleet.available("a")) == ([Draining("a", False)], True)


def test_what_attempts_show_ejects() -> None:
    s = Story()
    s.add("a")
    s.fleet.learn("a", rows("llama"))
    s.fleet.probed("a", None)
    s.heard()
    s.fleet.observed("a", Sign.ABORT)
    assert s.heard() == [Ejected("a", "abort")]
    s.now = 5.0
    s.fleet.canaried("a", None)
    assert s.heard() == [Returned("a", half_open=True)]


def test_scrapes_reach_the_core_with_restarts_before_them() -> None:
    s = Story()
    s.add("a")
    assert not s.fleet.scraped(Scraped("a", 0.0, iterations=5.0, started_at=1.0))
    assert s.heard() == []  # not announced yet
    s.fleet.learn("a", rows("llama"))
    s.fleet.probed("a", None)
    s.heard()
    values = Scraped("a", 1.0, iterations=1.0, started_at=2.0)
    assert s.fleet.scraped(values)
    assert s.heard() == [Restarted("a"), values]


def test_hanging_is_judged_with_our_own_requests_in_flight() -> None:
    s = Story(hang_s=3.0)
    s.add("a")
    s.fleet.learn("a", rows("llama"))
    s.fleet.probed("a", None)
    s.open["a"] = 2
    for now in range(5):
        s.now = float(now)
        s.fleet.scraped(Scraped("a", s.now, iterations=50.0))
    assert Ejected("a", "hung") in s.heard()


def test_a_removed_replica_is_forgotten_and_its_late_news_ignored() -> None:
    s = Story()
    s.add("a")
    s.fleet.learn("a", rows("llama"))
    s.heard()
    s.fleet.remove("a")
    assert s.heard() == [Removed("a")]
    s.fleet.probed("a", None)
    s.fleet.observed("a", Sign.REFUSED)
    s.fleet.learn("a", rows("llama"))
    assert s.fleet.scraped(Scraped("a")) is False
    assert s.heard() == []


def test_an_id_is_taken_only_once() -> None:
    s = Story()
    s.add("a")
    with pytest.raises(ValueError, match='replica "a" is there already'):
        s.add("a")


def test_addresses_are_taken_apart_for_the_connection() -> None:
    tls = Replica("a", "https://gpu.example/v")
    assert (tls.host, tls.port, tls.tls, tls.path_prefix) == ("gpu.example", 443, True, "/v")
    six = Replica("b", "http://[::1]:8000")
    assert (six.host, six.port, six.tls, six.path_prefix) == ("::1", 8000, False, "")
