"""Stories of one experiment over two gateways: told once, assigned alike, judged by the sums of both."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.experiment_cli import experiment
from gateway.experiment_table import Experiment
from gateway.shared import trials
from gateway.shared.clock import SharedClock
from gateway.trial import Trial
from policies.model import Request
from tests.gateway.running import Running, running, until
from tests.gateway.shared.pair import Server, two, up

TABLE: dict[str, Any] = {
    "name": "x",
    "swing": 0.0,
    "wash_s": 0.0,
    "arms": [{"name": "control"}, {"name": "new", "policy": "least_request"}],
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "SUMS_S", 0.05)
    monkeypatch.setattr(trials, "DETAILS_S", 0.05)


def trial(g: Running) -> Trial:
    found = g.gateway.experiments.trial
    assert found is not None
    return found


def runs(g: Running) -> bool:
    return g.gateway.experiments.running is not None


def surely_after(g: Running, unix: float) -> bool:
    """Whether the shared clock is past a moment, also where a better answer of Redis sets it back: by the round trip of
    the best one so far at most (each is wrong by half of its own)."""
    assert g.gateway.sharing is not None
    seen = g.gateway.sharing.clock._seen
    return len(seen) > 0 and time.time() + min(seen)[1] - min(seen)[0] > unix


async def results(g: Running) -> dict[str, Any]:
    found: dict[str, Any] = (await g.http.get("/admin/experiment")).json()
    return found


def counted(g: Running) -> list[int]:
    """Requests by arm, as this gateway knows of all."""
    return [arm["requests"] for arm in g.gateway.experiments.results()["arms"]]


def counted_before(g: Running) -> list[int]:
    """The same under the weights before."""
    return [arm["requests"] for arm in g.gateway.experiments.results()["phases"][0]["arms"]]


async def ask(g: Running, sessions: int = 12) -> None:
    """Once an experiment that runs here counts: what came before its weights by the clock then, is not of them."""
    found = g.gateway.experiments.trial
    if found is not None:
        await until(lambda: surely_after(g, found._since))
    for i in range(sessions):
        answer = await g.http.post(
            "/v1/chat/completions",
            json={"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
            headers={"x-session-id": f"s{i}", "authorization": "Bearer sk-big"},
        )
        assert answer.status_code == 200


async def start(g: Running, table: dict[str, Any] = TABLE) -> None:
    assert (await g.http.post("/admin/experiment", json=table)).status_code == 200


def as_if_so_many_had_ended(g: Running, each: int, arm_good: bool) -> None:
    """Of each arm, all of the control good."""
    for i in range(each):
        trial(g).guard.add((0, 0), i % 50, True, False, None, 0.0)
        trial(g).guard.add((1, 0), i % 50, arm_good, False, None, 0.0)
    trial(g).assigned += 2 * each


async def test_what_is_started_weighed_and_stopped_at_one_is_so_at_both_and_counted_over_both(server: Server) -> None:
    async with two(server) as (a, b):
        await start(a)
        await until(lambda: runs(b))
        assert trial(b).plan == trial(a).plan
        assert b.gateway.balancer.policy.name == "experiment"
        arms = [[g.gateway.experiments.trial.plan.arms[  # type: ignore[union-attr]
            trial(g)._assigner.assign(f"s{i}", 1_800_000_000.0).arm] for i in range(12)] for g in (a, b)]  # fmt: skip
        assert arms[0] == arms[1]
        news = arms[0].count("new")
        assert 0 < news < 12
        await ask(a)
        await ask(b)
        for g in (a, b):
            await until(lambda g=g: counted(g) == [2 * (12 - news), 2 * news])  # type: ignore[misc]
            assert (await results(g))["gateways"] == 2
        assert (await b.http.put("/admin/experiment/weights", json={"new": 3})).status_code == 200
        await until(lambda: trial(a).plan.weights == (1.0, 3.0))
        assert trial(a).plan == trial(b).plan
        for g in (a, b):
            assert counted(g) == [0, 0], "what was counted under other weights is not added"
        await until(lambda: counted_before(a) == [2 * (12 - news), 2 * news])
        assert (await a.http.post("/admin/experiment/stop?why=enough")).status_code == 200
        await until(lambda: not runs(b))
        assert (trial(b).ended_why, b.gateway.balancer.policy.name) == ("enough", "forebay")


async def test_a_guard_rail_judges_the_sums_of_both_and_stops_the_arm_at_both(server: Server) -> None:
    async with two(server) as (a, b):
        await start(a)
        await until(lambda: runs(b))
        for g in (a, b):
            as_if_so_many_had_ended(g, 60, arm_good=False)
            assert trial(g).judge(0.0) is None, "60 of each arm are too few to judge"
        await until(lambda: not runs(a) and not runs(b))
        await until(lambda: trial(a).announcement() == trial(b).announcement())  # each may have stopped it by itself
        assert trial(a).why_stopped["new"].startswith("guard rail: attainment is 100.0% below the control's")
        assert a.gateway.balancer.policy.name == b.gateway.balancer.policy.name == "forebay"


async def test_what_the_other_counted_can_acquit_an_arm(server: Server) -> None:
    """Bad luck at one gateway is no reason to stop what does well over both."""
    async with two(server) as (a, b):
        await start(a)
        await until(lambda: runs(b))
        as_if_so_many_had_ended(b, 100_000, arm_good=True)
        others = a.gateway.experiments.others
        assert others is not None
        await until(lambda: len(others.parts(trial(a), False)) == 1)
        as_if_so_many_had_ended(a, 200, arm_good=False)
        assert trial(a).judge(0.0) is not None
        assert trial(a).judge(0.0, others.parts(trial(a), False)) is None


async def test_without_redis_each_judges_alone_and_they_agree_when_it_is_back(server: Server) -> None:
    three = {**TABLE, "arms": [*TABLE["arms"], {"name": "third", "policy": "least_work"}]}
    async with two(server) as (a, b):
        await start(a, three)
        await until(lambda: runs(b))
        server.stop()
        await until(lambda: not up(a) and not up(b))
        as_if_so_many_had_ended(a, 200, arm_good=False)
        await until(lambda: "new" in trial(a).why_stopped)
        assert (await b.http.post("/admin/experiment/stop?arm=third&why=slow")).status_code == 200
        assert (trial(a).plan.stopped, trial(b).plan.stopped) == ({1}, {2})
        assert runs(a)
        assert runs(b)
        away = "Redis is away: what other gateways counted is as it was heard last"
        assert away in (await results(a))["notes"]
        server.start()
        await until(lambda: trial(a).plan.stopped == trial(b).plan.stopped == {1, 2})
        assert trial(b).why_stopped["third"] == "slow"
        await until(lambda: away not in a.gateway.experiments.results()["notes"])
        await until(lambda: trial(a).announcement() == trial(b).announcement())


async def test_who_comes_later_takes_part_and_who_comes_again_goes_on(server: Server, tmp_path: Path) -> None:
    journal = {"path": str(tmp_path / "journal.jsonl")}
    async with two(server) as (a, b):
        await start(a)
        assert (await a.http.put("/admin/experiment/weights", json={"new": 2})).status_code == 200
        await until(lambda: runs(b) and trial(b).plan == trial(a).plan)
        tables = {"redis": a.gateway.config.redis.model_dump(), "journal": journal, "policy": {"name": "forebay"}}
        urls = [replica.url for replica in a.gateway.config.replicas]
        async with running(*urls, **tables) as late:
            await until(lambda: runs(late))
            assert trial(late).plan == trial(a).plan
            await ask(late)
            await until(lambda: sum(counted(a)) == 12)
        server.client.flushall()
        await until(lambda: server.client.exists("{forebay}:experiment") == 1)  # whoever knows it tells it again
        async with running(*urls, **tables) as late:
            assert runs(late)
            await ask(late)
            await until(lambda: sum(counted(a)) == 24)


async def test_the_same_table_in_every_file_is_one_experiment_and_does_not_begin_again(server: Server) -> None:
    async with two(server) as (a, b):
        tables = {"redis": a.gateway.config.redis.model_dump(), "policy": {"name": "forebay"}, "experiment": TABLE}
        urls = [replica.url for replica in a.gateway.config.replicas]
        async with running(*urls, **tables) as c:
            await until(lambda: runs(a) and runs(b))
            first = trial(c).announcement()
            async with running(*urls, **tables) as d:
                await until(lambda: trial(d).announcement() == first)
                assert runs(d)
                assert (await b.http.post("/admin/experiment/stop?why=enough")).status_code == 200
                await until(lambda: not any(map(runs, (a, b, c, d))))
            async with running(*urls, **tables) as d:
                await until(lambda: trial(d).ended_why == "enough")
                assert d.gateway.balancer.policy.name == "forebay"
                await start(d, TABLE)  # an operator may start it again
                await until(lambda: all(map(runs, (a, b, c, d))))


async def test_a_change_of_configuration_starts_and_ends_one_experiment_at_both(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with two(server) as (a, b):
        assert (await a.http.patch("/admin/config", json={"experiment": TABLE})).status_code == 200
        await until(lambda: runs(b) and b.gateway.config.experiment is not None)
        await until(lambda: trial(a).announcement() == trial(b).announcement())
        ended = await b.http.patch("/admin/config", json={"experiment": None, "policy": {"name": "least_request"}})
        assert ended.status_code == 200
        await until(lambda: not runs(a) and a.gateway.balancer.policy.name == "least_request")
        assert (trial(a).ended_why, trial(b).ended_why) == ("taken out of the configuration",) * 2
        assert "refused here" not in caplog.text


async def test_an_experiment_that_cannot_run_at_one_gateway_is_told_once_and_harms_nothing(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with two(server) as (a, b):
        b.gateway.experiments.check = refuse  # type: ignore[method-assign, assignment]
        await start(a)
        await until(lambda: "cannot run here: no such policy" in caplog.text)
        assert runs(a)
        assert not runs(b)
        await ask(b)
        assert caplog.text.count("cannot run here") == 1


def refuse(*_: Any) -> None:
    raise ValueError("no such policy")


async def test_the_command_may_be_given_one_gateway_or_all(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(
        '[experiment]\nname = "x"\nswing = 0.0\nwash_s = 0.0\n'
        'arms = [{ name = "control" }, { name = "new", policy = "least_request" }]\n'
    )

    async def call(*arguments: str) -> str:
        done = await asyncio.to_thread(CliRunner().invoke, experiment, list(arguments))
        assert done.exit_code == 0, done.output
        return done.output

    async with two(server) as (a, b):
        await call("start", "--file", str(file), "--url", a.url)
        await until(lambda: runs(b))
        both = ["--url", a.url, "--url", b.url]
        assert "experiment x: runs at all gateways already" in await call("start", "--file", str(file), *both)
        await ask(a)
        await ask(b)
        await until(lambda: sum(counted(a)) == sum(counted(b)) == 24)
        for urls in (["--url", a.url], ["--url", b.url], both):
            assert '"gateways": 2' in await call("status", "--json", *urls)
        await call("weights", "new=2", "--url", b.url)
        await until(lambda: trial(a).plan.weights == (1.0, 2.0))
        assert "weights are [1.0, 2.0] already" in await call("weights", "new=2", "--url", a.url)
        await call("stop", "--why", "enough", "--url", a.url)
        await until(lambda: not runs(b))
        assert (await call("stop", *both)).count("experiment x: has ended already (enough)") == 2


def test_the_shared_clock_is_read_from_the_quickest_answer() -> None:
    now = [1000.0]
    clock = SharedClock(lambda: now[0])
    assert clock.command() == ("TIME",)
    now[0] += 0.5
    clock.heard([b"1010", b"250000"])
    assert clock.ahead_s == 10.0
    clock.command()
    now[0] += 3.0  # a slow answer says less
    clock.heard([b"1013", b"600000"])
    assert clock.ahead_s == 10.0
    clock.heard(ConnectionError("gone"))
    assert clock.ahead_s == 10.0


def test_slices_turn_by_the_shared_clock() -> None:
    table = {**TABLE, "design": "switchback", "probation_s": 0.0}
    made = Experiment.model_validate(table)
    right, late = (Trial(made, made.plan(1_800_000_000.0)) for _ in range(2))
    late.ahead_s = 70.0  # its own clock is so far behind
    for unix in range(1_800_000_000, 1_800_002_000, 25):
        given = [t.assign(Request("r", session="s"), at) for t, at in ((right, unix), (late, unix - 70.0))]
        assert given[0] == given[1]
