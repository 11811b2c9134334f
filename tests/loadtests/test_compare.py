"""`forebay compare` on a playground and on scripted servers: start state, order, refusal, what is written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from loadtests import cli, demo, results
from loadtests.compare import parse_arm
from loadtests.playground import Playground
from loadtests.replay import SetupError
from loadtests.start_state import StartState, StartStateError
from tests.loadtests.on_wire import PATIENT
from tests.loadtests.scripted import Call, Server, full_answer, scripted


class Cache:
    """A server whose cache can be told apart by salt, and emptied where it is allowed."""

    def __init__(self, resettable: bool = True, reports: bool = True, stuck: bool = False) -> None:
        self.seen: set[str] = set()
        self.resettable, self.reports, self.stuck = resettable, reports, stuck

    async def serve(self, call: Call) -> None:
        if call.path == "/reset_prefix_cache":
            if not self.resettable:
                await call.plain(404, {"detail": "Not Found"})
                return
            if not self.stuck:
                self.seen.clear()
            await call.plain(200, {"success": True})
        elif call.path == "/v1/chat/completions" and not call.json.get("stream"):
            key = f"{call.json.get('cache_salt')}/{call.json['messages']}"
            details = {"cached_tokens": 592 if key in self.seen else 0} if self.reports else None
            self.seen.add(key)
            usage = {"prompt_tokens": 600, "completion_tokens": 1, "prompt_tokens_details": details}
            await call.plain(200, {"choices": [], "usage": usage})
        elif call.path == "/v1/models":
            await call.plain(200, {"data": [{"id": "tiny"}]})
        elif call.path.startswith("/v1/"):
            await full_answer(call)
        else:
            await call.plain(404, {"detail": "Not Found"})


@asynccontextmanager
async def state_of(cache: Cache) -> AsyncIterator[tuple[StartState, Server]]:
    async with scripted(cache.serve) as server:
        state = StartState("tiny", [server.url])
        await state.look()
        yield state, server


async def test_a_replica_that_allows_it_is_emptied_and_the_probe_proves_it() -> None:
    async with state_of(Cache()) as (state, server):
        first = await state.prepare("a", None, server.url)
        await state.warm("a", server.url)
        second = await state.prepare("b", None, server.url)
    assert (first["proven"], second) == (False, {"method": "reset", "proven": True, "cached_tokens": [0]})
    assert state.salt_of("b") is None


async def test_where_it_cannot_be_emptied_each_run_has_a_salt_of_its_own() -> None:
    async with state_of(Cache(resettable=False)) as (state, server):
        await state.prepare("a", None, server.url)
        await state.warm("a", server.url)
        proof = await state.prepare("b", None, server.url)
    assert proof == {"method": "salt", "proven": True, "cached_tokens": [0]}
    assert state.salt_of("a") != state.salt_of("b")


async def test_a_cache_that_is_still_warm_stops_the_comparison() -> None:
    async with state_of(Cache(stuck=True)) as (state, server):
        await state.prepare("a", None, server.url)
        await state.warm("a", server.url)
        with pytest.raises(StartStateError, match="the canary found 592 cached tokens; the start state is not cold"):
            await state.prepare("b", None, server.url)


async def test_without_cached_tokens_the_state_is_unproven_not_proven() -> None:
    async with state_of(Cache(reports=False)) as (state, server):
        await state.prepare("a", None, server.url)
        await state.warm("a", server.url)
        proof = await state.prepare("b", None, server.url)
    assert (proof["proven"], proof["cached_tokens"]) == (False, [None])


async def compared(one: str, two: str, folder: Path) -> Result:
    """`forebay compare` of two servers, two blocks of a second."""
    arguments = [
        "compare", "--arm", f"one={one}", "--arm", f"two={two}", "--workload", "unique", "--window", "1",
        "--drain", "120", "--objective", "ttft=120s,tpot=120s", "--seeds", "2", "--no-noise-floor",
        "--out", str(folder),
    ]  # fmt: skip
    return await asyncio.to_thread(CliRunner().invoke, cli.build(["compare"]), arguments)


async def test_two_servers_by_url(tmp_path: Path) -> None:
    async with scripted(Cache().serve) as one, scripted(Cache().serve) as two:
        result = await compared(one.url, two.url, tmp_path)
    summary = results.read(tmp_path)
    assert [(run["policy"], run["seed"]) for run in summary["runs"]] == [
        ("one", 0), ("two", 0), ("two", 1), ("one", 1),
    ], result.output  # fmt: skip
    assert all(run["outcomes"]["good"] == run["offered"] for run in summary["runs"])
    assert [run["start_state"]["method"] for run in summary["runs"]] == ["salt"] * 4
    (comparison,) = summary["comparisons"]
    assert "claim" in comparison["statement"] or "no valid block" in comparison["statement"]
    assert sum(part["both"] for part in comparison["discordant"].values()) == sum(
        run["offered"] for run in summary["runs"] if run["policy"] == "one"
    )


async def test_runs_that_ended_are_kept_when_a_later_one_cannot_start(tmp_path: Path) -> None:
    caches, canaries = Cache(resettable=False), []

    async def fails_in_its_second_block(call: Call) -> None:
        if call.path == "/v1/chat/completions" and not call.json.get("stream"):
            canaries.append(call.path)
        if len(canaries) > 2:  # one before and one after its first run
            await call.plain(503, {"error": "gone"})
        else:
            await caches.serve(call)

    async with scripted(Cache().serve) as one, scripted(fails_in_its_second_block) as two:
        result = await compared(one.url, two.url, tmp_path)
    assert result.exit_code == 1
    assert "the canary was answered 503" in result.stderr
    assert "cut short: the 2 runs that ended are in" in result.output
    summary = results.read(tmp_path)
    assert [(run["policy"], run["seed"]) for run in summary["runs"]] == [("one", 0), ("two", 0)]
    assert (summary["comparisons"], summary["provenance"]["cut_short"]) == ([], True)
    drawn = CliRunner().invoke(cli.build(["report"]), ["report", str(tmp_path)])
    assert drawn.exit_code == 0, drawn.output


def test_policies_of_one_gateway_are_switched_and_start_cold(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with Playground(demo.replica_settings(), 2, PATIENT | {"policy": {"name": "random"}}) as ground:
        arguments = [
            "compare", "--gateway", ground.url, "--arm", "round_robin", "--arm", "least_request",
            "--workload", "unique", "--load", "0.5", "--window", "2", "--drain", "20", "--seeds", "1",
            "--time-scale", "2", "--objective", "ttft=60s,tpot=10s", "--out", str(tmp_path),
            *(word for url in ground.replica_urls for word in ("--replica", url)),
        ]  # fmt: skip
        result = CliRunner().invoke(cli.build(["compare"]), arguments)
        left = httpx.get(f"{ground.url}/admin/policy", timeout=60).json()["name"]
    assert left == "random"  # its own again, and said so
    assert f"{ground.url} runs random again" in " ".join(result.output.split())
    runs = results.read(tmp_path)["runs"]
    names = {"round_robin", "round_robin (again)", "least_request"}
    assert {run["policy"] for run in runs} == names, result.output
    assert all(run["start_state"]["cached_tokens"] == [0, 0] for run in runs)
    assert [run["start_state"]["proven"] for run in runs] == [False, True, True]
    assert len({run["schedule_sha256"] for run in runs}) == 1
    assert all(sum(run["outcomes"].values()) == run["offered"] > 0 for run in runs)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("answered", "status", "says"), [
    ({"known": {"forebay": "", "random": ""}}, 200, "--arm rendom+admission: {url} knows forebay, random\n"),
    ({"errors": ["a bearer token is needed"]}, 401, "{url}: needs the admin token; put it into FOREBAY_ADMIN_TOKEN\n"),
    ({"detail": "Not Found"}, 404, "{url}: answered 404 at /admin/policy: is that a Forebay gateway?\n"),
])  # fmt: skip
async def test_a_policy_that_the_gateway_does_not_know_is_told_before_the_first_run(
    answered: dict[str, object], status: int, says: str, tmp_path: Path
) -> None:
    paths = []

    async def serve(call: Call) -> None:
        paths.append(call.path)
        await call.plain(status, answered)

    async with scripted(serve) as server:
        arguments = [
            "compare", "--gateway", server.url, "--arm", "forebay", "--arm", "rendom+admission", "--model", "m",
            "--workload", "unique", "--window", "1", "--drain", "9", "--time-scale", "2", "--out", str(tmp_path),
        ]  # fmt: skip
        result = await asyncio.to_thread(CliRunner().invoke, cli.build(["compare"]), arguments)
    assert (result.exit_code, result.stderr) == (1, f"forebay compare: {says.format(url=server.url)}")
    assert paths == ["/admin/policy"]


def test_nobody_at_an_arm_is_told_with_the_option_that_gave_it(tmp_path: Path) -> None:
    arguments = [
        "compare", "--arm", "a=http://127.0.0.1:9", "--arm", "b=http://127.0.0.1:9", "--workload", "unique",
        "--window", "1", "--out", str(tmp_path),
    ]  # fmt: skip
    result = CliRunner().invoke(cli.build(["compare"]), arguments)
    said = "--arm a: http://127.0.0.1:9: nobody answers there; check that it is up"
    assert (result.exit_code, result.stderr) == (2, f"forebay compare: {said}\n")


@pytest.mark.parametrize(("text", "gateway", "says"), [
    ("forebay", None, "NAME=URL would be right, or --gateway URL"),
    ("x=http://h:1", "http://g:1", "with --gateway an arm is a policy"),
])  # fmt: skip
def test_a_wrong_arm_is_named(text: str, gateway: str | None, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        parse_arm(text, gateway)


def test_one_arm_is_no_comparison(tmp_path: Path) -> None:
    arguments = ["compare", "--arm", "a=http://h:1", "--workload", "chat", "--window", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.build(["compare"]), arguments)
    assert result.exit_code == 2
    assert "at least two arms of different names would be right" in result.stderr
