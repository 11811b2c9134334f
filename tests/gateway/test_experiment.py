"""An experiment as an operator runs it: start, read, weigh, stop; restarts and several gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from gateway.config import ConfigError, build
from gateway.hand_link import Remote
from gateway.hub import Hub
from loadtests.replica import Fleet, ReplicaSettings
from policies.clusters import REQUESTS
from policies.designs import Assignment
from policies.model import Request
from tests.gateway.running import Running, running, until

TITLE = ("req-1", 0.0, "/v1/chat/completions", "generate")
TABLE: dict[str, Any] = {
    "name": "x",
    "swing": 0.0,
    "wash_s": 0.0,
    "arms": [{"name": "control"}, {"name": "new", "policy": "least_request"}],
}


@pytest.fixture
async def sim() -> AsyncIterator[Fleet]:
    async with Fleet.of(ReplicaSettings(time_scale=50.0), 2) as fleet:
        yield fleet


def finished(g: Running) -> int:
    """Requests of the experiment whose end was seen, counted or not."""
    trial = g.gateway.experiments.trial
    return 0 if trial is None else int(sum(trial.guard.total(arm, REQUESTS) for arm in range(len(trial.plan.arms))))


async def ask(g: Running, sessions: int = 12) -> None:
    before = finished(g)
    for i in range(sessions):
        answer = await g.http.post(
            "/v1/chat/completions",
            json={"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
            headers={"x-session-id": f"s{i}"},
        )
        assert answer.status_code == 200
    trial = g.gateway.experiments.running
    if trial is not None:  # an answer reaches its client before its record is closed
        await until(lambda: finished(g) == before + sessions)


async def results(g: Running) -> dict[str, Any]:
    found: dict[str, Any] = (await g.http.get("/admin/experiment")).json()
    return found


def arms_of(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {line["session"]: line["arm"] for line in lines}


async def test_arms_are_assigned_by_session_recorded_and_counted(sim: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    async with running(*sim.urls, journal={"path": str(path)}) as g:
        assert (await results(g)) == {"state": "none", "arms": []}
        assert (await g.http.post("/admin/experiment", json=TABLE)).status_code == 200
        await ask(g)
        await ask(g)
        await until(lambda: g.gateway.journal is not None and g.gateway.journal.written >= 24)
        told = await results(g)
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert {line["arm"] for line in lines} == {"control", "new"}
    assert {(line["arm"], line["policy"]) for line in lines} == {("control", "round_robin"), ("new", "least_request")}
    assert len(arms_of(lines)) == 12
    assert len({(line["session"], line["arm"]) for line in lines}) == 12  # sticky
    assert told["state"] == "running"
    assert [arm["name"] for arm in told["arms"]] == ["control", "new"]
    assert sum(arm["requests"] for arm in told["arms"]) == 24
    assert [arm["attainment"] for arm in told["arms"]] == [1.0, 1.0]
    assert told["arms"][1]["difference"]["estimate"] == 0.0


async def test_another_gateway_assigns_the_same_sessions_to_the_same_arms(sim: Fleet, tmp_path: Path) -> None:
    seen = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.jsonl"
        environ = {"FOREBAY_JOURNAL_SECRET": "same"}
        async with running(*sim.urls, environ=environ, journal={"path": str(path)}, experiment=TABLE) as g:
            await ask(g)
            await until(lambda g=g: g.gateway.journal is not None and g.gateway.journal.written >= 12)  # type: ignore[misc]
        seen.append(arms_of([orjson.loads(line) for line in path.read_bytes().splitlines()]))
    assert seen[0] == seen[1]


async def test_counts_and_a_stopped_arm_survive_a_restart(sim: Fleet, tmp_path: Path) -> None:
    journal = {"path": str(tmp_path / "journal.jsonl")}
    async with running(*sim.urls, journal=journal) as g:
        await g.http.post("/admin/experiment", json=TABLE)
        await ask(g)
        before = await results(g)
    async with running(*sim.urls, journal=journal) as g:
        after = await results(g)
        assert [arm["requests"] for arm in after["arms"]] == [arm["requests"] for arm in before["arms"]]
        assert after["started_unix"] == before["started_unix"]
        await ask(g)
        assert sum(arm["requests"] for arm in (await results(g))["arms"]) == 24
        assert (await g.http.post("/admin/experiment/stop?arm=new&why=enough")).status_code == 200
    async with running(*sim.urls, journal=journal) as g:
        after = await results(g)
        assert (after["state"], after["ended_why"]) == ("ended", "enough")
        assert after["arms"][1]["stopped_why"] == "enough"
        await ask(g)
        assert sum(arm["requests"] for arm in (await results(g))["arms"]) == 24


async def test_stopping_gives_all_traffic_back_to_the_policy_of_the_configuration(sim: Fleet) -> None:
    async with running(*sim.urls, experiment=TABLE) as g:
        own = g.gateway.balancer.policy
        assert own.name == "experiment"
        await ask(g)
        assert (await g.http.post("/admin/experiment/stop")).status_code == 200
        assert g.gateway.balancer.policy.name == "round_robin"
        await ask(g)
        assert sum(arm["requests"] for arm in (await results(g))["arms"]) == 12
        again = await g.http.post("/admin/experiment/stop")
        assert (again.status_code, again.json()) == (400, {"errors": ["no experiment is running"]})


async def test_a_partition_needs_two_replicas_an_arm(sim: Fleet) -> None:
    async with running(*sim.urls) as g:
        refused = await g.http.post("/admin/experiment", json={**TABLE, "design": "partition"})
        line = "experiment.design: a partition needs two replicas an arm, so 4; there are 2"
        assert (refused.status_code, refused.json()) == (400, {"errors": [line]})
        patch = {"experiment": {**TABLE, "design": "partition"}, "policy": {"name": "least_request"}}
        assert (await g.http.patch("/admin/config", json=patch)).json() == {"errors": [line]}
        assert g.gateway.balancer.policy.name == "round_robin"  # refused whole
        assert (await results(g))["state"] == "none"


async def test_new_weights_begin_a_new_count_and_keep_the_old_one(sim: Fleet) -> None:
    async with running(*sim.urls, experiment=TABLE) as g:
        await ask(g)
        answer = await g.http.put("/admin/experiment/weights", json={"new": 3})
        assert answer.json()["changed"] == ["experiment x: weights [1.0, 1.0] -> [1.0, 3]"]
        told = await results(g)
        assert [arm["weight"] for arm in told["arms"]] == [1.0, 3]
        assert sum(arm["requests"] for arm in told["arms"]) == 0
        assert sum(arm["requests"] for arm in told["phases"][0]["arms"]) == 12
        wrong = await g.http.put("/admin/experiment/weights", json={"nobody": 3})
        assert wrong.json()["errors"] == ['arm "nobody" is not known; one of control, new would be right']


@pytest.mark.parametrize("weight", [0, -1, 1e308, 10**18, True, "1"])
async def test_a_weight_that_cannot_be_changes_nothing(sim: Fleet, weight: Any) -> None:
    async with running(*sim.urls) as g:
        assert (await g.http.post("/admin/experiment", json=TABLE)).status_code == 200
        answer = await g.http.put("/admin/experiment/weights", json={"control": weight})
        assert answer.status_code == 400
        assert "a number above 0" in answer.json()["errors"][0]
        trial = g.gateway.experiments.running
        assert trial is not None
        assert trial.plan.weights == (1.0, 1.0)


async def test_the_policy_cannot_change_under_a_running_experiment(sim: Fleet) -> None:
    async with running(*sim.urls, experiment=TABLE) as g:
        refused = await g.http.put("/admin/policy", json={"name": "least_request"})
        assert refused.status_code == 400
        assert "stop it before policy, admission or pacing change" in refused.json()["errors"][0]
        assert (await g.http.post("/admin/experiment", json=TABLE)).status_code == 400
        ended = await g.http.patch("/admin/config", json={"experiment": None, "policy": {"name": "least_request"}})
        assert ended.status_code == 200
        assert g.gateway.balancer.policy.name == "least_request"


async def test_a_switchback_turns_the_settings_of_the_core_and_gives_them_back(sim: Fleet) -> None:
    table = {
        **TABLE,
        "design": "switchback",
        "slice_s": 60.0,
        "arms": [{"name": "paced"}, {"name": "free", "core": {"pacing": True, "pace": 0.5}}],
    }
    async with running(*sim.urls) as g:
        now = [1_800_000_030.0]
        experiments = g.gateway.experiments
        experiments.wall = lambda: now[0]
        assert (await g.http.post("/admin/experiment", json=table)).status_code == 200
        seen = set()
        for _ in range(8):
            experiments.tick()
            seen.add((g.gateway.balancer.settings.pacing, g.gateway.balancer.settings.pace))
            now[0] += 60.0
        assert seen == {(False, None), (True, 0.5)}
        await g.http.post("/admin/experiment/stop")
        assert (g.gateway.balancer.settings.pacing, g.gateway.balancer.settings.pace) == (False, None)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"arms": []}, "experiment.arms: 0 arms; 2 to 8 would be right, the first is the control"),
        ({"wash_s": 120.0, "swing": 0.5}, "experiment.wash_s = 120: must be below slice_s, which is 120"),
        (
            {"arms": [{"name": "a"}, {"name": "a"}]},
            'experiment.arms[1].name = "a": is taken by arms[0]',
        ),
        (
            {"arms": [{"name": "a"}, {"name": "b", "core": {"pacing": False}}]},
            'experiment.arms[1].core: arms share one queue here; only design = "switchback" can change it',
        ),
        (
            {"design": "partition", "arms": [{"name": "a"}, {"name": "b", "weight": 2.0}]},
            "experiment.arms: the groups of a partition are of matched size, so all weights must be equal",
        ),
    ],
)
def test_a_table_that_cannot_be_says_why(change: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"experiment": {**TABLE, **change}})
    assert caught.value.lines == [line]


def test_an_arm_with_a_suffix_is_told_where_that_is_switched() -> None:
    with pytest.raises(ConfigError, match="admission and pacing are switched in core"):
        build({"experiment": {**TABLE, "arms": [{"name": "a"}, {"name": "b", "policy": "round_robin+pacing"}]}})


async def test_shadows_are_journalled_and_counted_and_an_experiment_runs_beside_them(
    sim: Fleet, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    shadow = {"policies": ["least_work", "lmetric"], "share": 1.0}
    async with running(
        *sim.urls, policy={"name": "forebay"}, journal={"path": str(path)}, shadow=shadow, experiment=TABLE
    ) as g:
        await ask(g)
        await until(lambda: g.gateway.journal is not None and g.gateway.journal.written >= 12)
        page = (await g.http.get("/metrics")).text
        assert 'forebay_experiment_running{arm="new",experiment="x"} 1.0' in page
        changed = await g.http.patch("/admin/config", json={"shadow": {"policies": []}})
        assert changed.status_code == 200
        assert "forebay_shadow_requests_total{" not in (await g.http.get("/metrics")).text
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert all([seen["policy"] for seen in line["shadows"]] == ["least_work", "lmetric"] for line in lines)
    asked = [line for line in page.splitlines() if line.startswith("forebay_shadow_requests_total{agrees=")]
    assert sum(float(line.split()[-1]) for line in asked) == 24
    assert {line["policy"] for line in lines} == {"forebay", "least_request"}


async def test_a_guard_rail_returns_traffic_to_the_control_on_its_own(
    sim: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    table = {**TABLE, "arms": [{"name": "control"}, {"name": "bad", "policy": "least_request"}]}
    async with running(*sim.urls, experiment=table) as g:
        trial = g.gateway.experiments.trial
        assert trial is not None
        for i in range(400):  # as if so many had ended
            trial.guard.add((i % 2, 0), i % 100, i % 2 == 0, False, None, 0.0)
        await until(lambda: not trial.running)
        assert "arm bad is stopped: attainment is 100.0% below the control's" in caplog.text
        assert g.gateway.balancer.policy.name == "round_robin"
        told = (await results(g))["arms"][1]
        assert told["state"] == "stopped"
        assert told["stopped_why"].startswith("guard rail: attainment")


async def test_a_request_whose_first_token_is_overdue_is_seen_by_guard_rails_while_it_waits() -> None:
    classes = {"standard": {"ttft_s": 0.001, "ttft_s_per_token": 0.0}}
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
    async with (
        Fleet.of(ReplicaSettings(time_scale=0.001), 1) as slow,  # its first token takes a quarter of a minute
        running(*slow.urls, experiment=TABLE, classes=classes, health={"hang_s": 600.0}) as g,
    ):
        trial = g.gateway.experiments.trial
        assert trial is not None
        asked = asyncio.create_task(g.http.post("/v1/chat/completions", json=body, headers={"x-session-id": "s"}))
        await until(lambda: trial.watched().total(0, REQUESTS) + trial.watched().total(1, REQUESTS) == 1)
        assert trial.guard.rows == {}
        asked.cancel()
        await until(lambda: g.gateway.open_requests == 0)
        g.gateway.experiments.tick()
        assert trial.overdue.rows == {}


@pytest.mark.plain
def test_the_core_of_several_processes_knows_which_requests_are_late() -> None:
    given = Assignment(1, 0, 0, 7, None, True)
    waits = Request("1.a", received_at=100.0, ttft_deadline=101.0)
    link: Any = None
    asked = {
        "waits": (waits, given, False),
        "begun": (waits, given, True),
        "apart": (waits, None, False),
        "whole": (replace(waits, streams=False), given, False),
    }
    remotes = {}
    for id, (request, assignment, begun) in asked.items():
        remote = remotes[id] = Remote(link, id, request, TITLE)
        remote.assignment, remote.begun = assignment, begun
    core: Any = SimpleNamespace(hands=[SimpleNamespace(open=remotes)])
    assert list(Hub.late_requests(core, 100.5)) == []
    assert list(Hub.late_requests(core, 103.0)) == [(given, 3.0)]


async def test_the_file_starts_weighs_and_ends_an_experiment_when_it_is_read_again(sim: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    head = '[experiment]\nname = "x"\nswing = 0.0\n'
    arms = 'arms = [{{ name = "control" }}, {{ name = "new", policy = "least_request", weight = {} }}]\n'
    file.write_text(head + arms.format(1.0))
    async with running(*sim.urls, file=file) as g:
        first = g.gateway.experiments.trial
        assert first is not None
        file.write_text(head + arms.format(3.0))
        assert (await g.http.post("/admin/reload")).status_code == 200
        assert g.gateway.experiments.trial is first
        assert first.plan.weights == (1.0, 3.0)
        file.write_text("")
        assert (await g.http.post("/admin/reload")).status_code == 200
        assert (first.running, first.ended_why) == (False, "taken out of the configuration")
        file.write_text(head.replace('"x"', '"y"') + arms.format(1.0))
        assert (await g.http.post("/admin/reload")).status_code == 200
        assert (await results(g))["name"] == "y"


async def test_a_spoilt_state_file_is_left_alone_and_stops_nothing(
    sim: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "journal.jsonl.experiment.json"
    state.write_text('{"schema": 1, "table": ')
    async with running(*sim.urls, journal={"path": str(tmp_path / "journal.jsonl")}, experiment=TABLE) as g:
        await ask(g)
        assert (await results(g))["state"] == "running"
    assert "cannot be read and is left alone" in caplog.text
    assert state.read_text() == '{"schema": 1, "table": '


async def test_an_experiment_ends_by_itself_when_its_hours_are_over(sim: Fleet) -> None:
    async with running(*sim.urls, experiment={**TABLE, "hours": 2.0}) as g:
        experiments = g.gateway.experiments
        trial = experiments.trial
        assert trial is not None
        experiments.wall = lambda: trial.plan.started_unix + 7201.0
        experiments.tick()
        assert trial.ended_why == "its 2 hours are over"
