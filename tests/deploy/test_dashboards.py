"""Dashboards, rules and alerts read only what a gateway exports: each metric, and each label of it, on a real page."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.hands import HandSeries
from gateway.remote import ANSWER_S
from gateway.shared.sharing import Sharing
from loadtests.faults import Command
from loadtests.replica import Fleet, ReplicaSettings
from tests.deploy.promql import reads
from tests.gateway.running import running, until
from tests.serving import samples

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = {
    path.stem: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
}
ADDED_BY_PROMETHEUS = {"job", "instance"}


def rules() -> Iterator[dict[str, Any]]:
    for file in ("rules.yaml", "alerts.yaml"):
        for group in yaml.safe_load((DEPLOY / "prometheus" / file).read_text())["groups"]:
            yield from group["rules"]


def expressions() -> Iterator[tuple[str, str]]:
    """(where it stands, expression) of every panel, variable and rule."""
    for name, dashboard in DASHBOARDS.items():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"]
    for rule in rules():
        yield str(rule.get("alert") or rule["record"]), rule["expr"]


def of_several_processes() -> str:
    """What a gateway with workers and Redis exports beside that, from the collectors that make it."""
    state = {"open": 1, "lag_s": 0.1, "lag_max_s": 0.1, "draining": False, "local": 0}
    answers = [[0] * (len(ANSWER_S) + 1), 0.0]
    hand: Any = SimpleNamespace(slot=0, state={**state, "answers": answers})
    hub: Any = SimpleNamespace(hands=[hand], lost_hands=0)
    store = SimpleNamespace(up=True, calls={("exchange", "ok"): 1, ("lookup", "late"): 1})
    sharing: Any = SimpleNamespace(store=store, registers=SimpleNamespace(peers={}))

    class Shared(Collector):
        def collect(self) -> Iterator[Metric]:
            return Sharing.collect(sharing)

    registry = CollectorRegistry()
    registry.register(HandSeries(hub))
    registry.register(Shared())
    return generate_latest(registry).decode()


async def exported(tmp_path: Path) -> dict[str, set[str]]:
    """Metric: labels, of a gateway that has seen each kind of thing happen once."""
    settings = ReplicaSettings(time_scale=20.0)
    source = tmp_path / "replicas.toml"
    async with Fleet.of(settings, 2) as sim:
        source.write_text(f'[[replicas]]\nurl = "{sim.urls[1]}"\nid = "r1"\n')
        file = {"discovery": {"file": {"path": str(source), "poll_s": 0.02}}}
        experiment = {"name": "trial", "arms": [{"name": "control"}, {"name": "other", "policy": "least_request"}]}
        compared = {"experiment": experiment, "shadow": {"policies": ["round_robin"], "share": 1.0}}
        policy = {**compared, "policy": {"name": "forebay", "seed": 1}}
        async with running(sim.urls[0], **policy, **file) as g:
            await until(lambda: g.gateway.fleet.available("r1"))
            long = [{"role": "user", "content": "the same long beginning of everything " * 200}]
            for _ in range(3):
                await g.chat(stream=True, messages=long)
            await g.chat(model="typo")
            sim.members[0].order(Command("kill"))
            await until(lambda: g.reason("r0") == "refused")
            sim.members[0].order(Command("restart"))
            await until(lambda: g.gateway.metrics.counted.restarts[("r0",)] == 1 and g.gateway.fleet.available("r0"))
            page = (await g.http.get("/metrics")).text + of_several_processes()
    found: dict[str, set[str]] = {line.split()[2]: set() for line in page.splitlines() if line.startswith("# TYPE ")}
    for name, labels, _ in samples(page):
        found.setdefault(name, set()).update(labels)
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    return asyncio.run(exported(tmp_path_factory.mktemp("page")))


def test_every_metric_and_label_that_is_read_is_exported(page: dict[str, set[str]]) -> None:
    known = {name: labels | ADDED_BY_PROMETHEUS for name, labels in page.items()}
    known["forebay_experiment_difference"] |= {"experiment", "arm", "bound"}  # has samples after many requests only
    known["up"] = set(ADDED_BY_PROMETHEUS)
    for rule in rules():
        if "record" in rule:
            known[rule["record"]] = reads(rule["expr"]).grouped - {"instance"}
    wrong = []
    for where, expression in expressions():
        read = reads(expression)
        assert read.series, where
        for name, labels in read.series.items():
            if name not in known:
                wrong.append(f"{where}: there is no {name}")
            elif missing := labels - known[name]:
                wrong.append(f"{where}: {name} has no label {', '.join(sorted(missing))}")
        there = {label for name in read.series for label in known.get(name, ())}
        wrong += [f"{where}: nothing it reads has the label {label}" for label in sorted(read.grouped - there)]
    assert wrong == []


@pytest.mark.parametrize("document", [path.name for path in sorted(DEPLOY.glob("*.md"))])
def test_metrics_that_the_documentation_names_are_exported(document: str, page: dict[str, set[str]]) -> None:
    text = (DEPLOY / document).read_text()
    named = set(re.findall(r"\bforebay_[a-z0-9_]+", text)) - {"forebay_demand_requests"}  # that one is the adapter's
    families = {name.removesuffix(part) for name in page for part in ("", "_bucket", "_count", "_sum")}
    assert named - families == set()


def test_the_reader_of_expressions_sees_names_and_labels() -> None:
    read = reads(
        'histogram_quantile(0.9, sum by (le, a) (rate(m_bucket{b=~"$b", c="x"}[5m]))) / on (d) other:rate5m > 1'
    )
    assert read.series == {"m_bucket": {"b", "c"}, "other:rate5m": set()}
    assert read.grouped == {"le", "a", "d"}


def test_there_is_a_dashboard_for_each_question() -> None:
    assert DASHBOARDS.keys() == {
        *("forebay-goodput", "forebay-classes", "forebay-fleet", "forebay-policies", "forebay-gateway"),
    }


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_whole(name: str, page: dict[str, set[str]]) -> None:
    dashboard = DASHBOARDS[name]
    assert dashboard["uid"] == name
    variables = {v["name"]: v for v in dashboard["templating"]["list"]}
    assert "datasource" in variables
    for variable in variables.values():
        if variable["type"] == "query":
            metric, label = variable["query"]["query"].removeprefix("label_values(").rstrip(")").split(", ")
            assert label in page[metric] | ADDED_BY_PROMETHEUS
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        used = {part for t in panel["targets"] for part in variables if f"${part}" in t["expr"]}
        assert used <= variables.keys()
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_grafana_finds_its_dashboards_and_prometheus() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/forebay.yaml").read_text())["providers"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in compose["grafana"]["volumes"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose
