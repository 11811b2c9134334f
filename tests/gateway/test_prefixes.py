"""Prompt families of live traffic: found, told, and without a word of any prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner, Result

from gateway.prefixes import Prefixes
from gateway.sections import Prefixes as PrefixesTable
from loadtests.cli import build
from loadtests.replica import Fleet, ReplicaSettings
from tests.gateway.running import Running, running, until

SHARED = "\n".join(f"Rule {n}: be brief about the {n}th secretword and cite what you know." for n in range(60))
CLEAN = SHARED.replace("Rule", "Clause").replace("brief", "thorough")
LOOKING: dict[str, Any] = {"policy": {"name": "least_work", "seed": 1}, "prefixes": {"cpu_share": 0.5}}


@pytest.fixture
async def sim() -> AsyncIterator[Fleet]:
    async with Fleet.of(ReplicaSettings(time_scale=50.0), 2) as fleet:
        yield fleet


async def talk(g: Running, requests: int = 12) -> None:
    """Two applications: one tells the time first of all, the other says nothing that changes."""
    for n in range(requests):
        system = f"It is 2026-06-03T10:{n:02}:30Z now.\n{SHARED}"
        for said in (system, CLEAN):
            messages = [{"role": "system", "content": said}, {"role": "user", "content": f"question {n} {n * n}"}]
            assert (await g.chat(messages=messages)).status_code == 200
    prefixes = g.gateway.prefixes
    assert prefixes is not None
    await until(lambda: prefixes.idle)


async def told(g: Running) -> dict[str, Any]:
    answer = await g.http.get("/admin/prefixes")
    assert answer.status_code == 200
    report: dict[str, Any] = answer.json()
    return report


async def test_a_time_in_front_of_the_shared_text_is_found_with_its_place_and_loss(sim: Fleet) -> None:
    async with running(*sim.urls, **LOOKING) as g:
        await talk(g)
        report = await told(g)
    assert len(report["families"]) == 2
    (leak,) = report["leaks"]
    assert (leak["kind"], leak["path"], leak["offset"], leak["chunk"]) == ("timestamp", "messages[0].content", 6, 0)
    assert leak["advice"].startswith("move the time behind the shared text")
    assert leak["lost_tokens_per_request"] == pytest.approx(len(SHARED) / 4, rel=0.1)
    clean = next(row for row in report["families"] if row["id"] != leak["family"])
    leaky = next(row for row in report["families"] if row["id"] == leak["family"])
    assert clean["lost_tokens_per_hour"] == 0
    assert leaky["ceiling"] < 0.1
    assert leaky["ceiling_without_leaks"] > 0.7
    assert clean["ceiling"] > 0.7


async def test_tokens_are_told_by_model_with_their_ceiling(sim: Fleet) -> None:
    async with running(*sim.urls, **LOOKING) as g:
        await talk(g)
        (row,) = (await told(g))["models"].values()
        page = (await g.http.get("/metrics")).text
    assert row["requests"] == 24
    assert 0 < row["cached_tokens"] <= row["prompt_tokens"]
    assert row["reuse"] <= row["ceiling"] <= 0.6
    assert 'forebay_prefix_lost_tokens_total{leak="timestamp"}' in page
    assert 'forebay_prefix_model_tokens_total{model="sim",of="cacheable"}' in page


async def test_nothing_that_is_told_holds_a_word_of_a_prompt(sim: Fleet) -> None:
    async with running(*sim.urls, **LOOKING) as g:
        await talk(g)
        report = await told(g)
        registry = CollectorRegistry()
        assert g.gateway.prefixes is not None
        registry.register(g.gateway.prefixes)
        shown = orjson.dumps(report) + generate_latest(registry)
    assert b"secretword" not in shown
    assert b"2026-06-03" not in shown


async def test_samples_show_the_text_around_a_split_when_the_operator_wants_them(sim: Fleet) -> None:
    async with running(*sim.urls, **LOOKING | {"prefixes": {"cpu_share": 0.5, "samples": True}}) as g:
        await talk(g)
        (leak,) = (await told(g))["leaks"]
    assert "2026-06-03T10:" in leak["sample"]


async def test_switched_off_there_is_no_report(sim: Fleet) -> None:
    async with running(*sim.urls, prefixes={"enabled": False}) as g:
        answer = await g.http.get("/admin/prefixes")
    assert answer.status_code == 404
    assert answer.json() == {"errors": ["prefixes.enabled is false: no prompt family is looked for"]}


def command(*arguments: str, **environ: str) -> Result:
    env = {"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb", **environ}
    return CliRunner(env=env).invoke(build(["prefixes"]), ["prefixes", *arguments])


async def test_the_command_prints_the_table_and_the_advice(sim: Fleet) -> None:
    environ = {"FOREBAY_ADMIN_TOKEN": "s3cret"}
    async with running(*sim.urls, environ=environ, **LOOKING) as g:
        await talk(g)
        refused = await asyncio.to_thread(command, g.url, FOREBAY_ADMIN_TOKEN="")
        shown = await asyncio.to_thread(command, g.url, **environ)
        as_json = await asyncio.to_thread(command, g.url, "--json", **environ)
    assert refused.exit_code == 1
    assert refused.stderr.endswith("needs the admin token; put it into the environment variable FOREBAY_ADMIN_TOKEN\n")
    assert shown.exit_code == 0
    assert "Prompt families (2)" in shown.output
    assert "timestamp  messages[0].content" in shown.output
    assert "messages[0].content: move the time behind the shared text" in shown.output
    assert orjson.loads(as_json.output)["leaks"][0]["kind"] == "timestamp"


def test_a_journal_is_added_up_afterwards(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    leak = {
        "kind": "uuid",
        "path": "messages[0].content",
        "offset": 46,
        "family": "f3",
        "lost_tokens": 900,
        "requests": 2,
    }
    rows = [
        {
            "received_unix": 1000.0 + 90 * n, "model": "sim", "tenant": None, "outcome": "success",
            "prompt_tokens": [1000, "usage"], "cached_tokens": [200, "usage"], "cacheable_tokens": 600,
            "prediction": {"cached_tokens": 250}, "unmatched": leak if n % 2 else None,
        }
        for n in range(21)
    ]  # fmt: skip
    rows.append({**rows[0], "outcome": "shed"})
    journal.write_bytes(b"\n".join([*map(orjson.dumps, rows), b'{"schema": 1}', b"not json", b""]))
    read = orjson.loads(command(str(journal), "--json").output)
    assert read["models"]["sim"] == {
        "requests": 21, "prompt_tokens": 21_000, "cached_tokens": 4_200, "predicted_tokens": 5_250,
        "cacheable_tokens": 12_600, "reuse": 0.2, "predicted_reuse": 0.25, "ceiling": 0.6,
    }  # fmt: skip
    (row,) = read["leaks"]
    assert (row["family"], row["kind"], row["samples"]) == ("f3", "uuid", 10)
    assert (row["requests_per_hour"], row["lost_tokens_per_request"], row["lost_tokens_per_hour"]) == (40, 450, 18_000)
    assert row["lost_error"] == 0.224  # ten samples that stand for two requests each: 1 / sqrt(20)
    assert read["passed_over"] == 2
    shown = command(str(journal)).output
    assert "f3      uuid  messages[0].content" in shown
    assert "move the id into the request's metadata" in shown
    assert "A journal holds no prompt families: a line names one only beside a leak" in shown
    journal.write_bytes(orjson.dumps(rows[0]))
    without = command(str(journal)).output
    assert "No leak in this journal." in without
    journal.write_bytes(b"INFO forebay: in rotation\n" * 3)
    other = command(str(journal))
    line = f"forebay prefixes: {journal}: is no journal of a gateway: none of its 3 lines tells a request\n"
    assert (other.exit_code, other.stderr) == (1, line)
    assert "No prompt family yet" not in without


def test_what_is_neither_a_file_nor_an_address_is_said() -> None:
    answer = command("gateway.internal")
    assert answer.exit_code == 1
    assert answer.stderr == "forebay prefixes: gateway.internal: is no file, and an address begins with http://\n"


def test_the_command_says_when_nobody_answers() -> None:
    answer = command("http://127.0.0.1:9")
    assert answer.exit_code == 1
    assert answer.stderr.startswith("forebay prefixes: http://127.0.0.1:9: no gateway answers")


def test_help_has_an_example() -> None:
    assert "Example: forebay prefixes http" in command("--help").output


async def test_a_prompt_that_cannot_be_judged_costs_nobody_anything(
    sim: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Iterator[None]:
        yield
        raise ZeroDivisionError

    monkeypatch.setattr("gateway.prefixes.cutting", broken)
    async with running(*sim.urls, **LOOKING) as g:
        await talk(g, 2)
        assert (await told(g))["families"] == []
    assert "could not be judged" in caplog.text


async def test_a_long_prompt_is_looked_into_in_steps_between_which_others_run(
    sim: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.prefixes.STEP_S", 0.0)  # a phrase each
    async with running(*sim.urls, **LOOKING) as g:
        prefixes = g.gateway.prefixes
        assert prefixes is not None
        step, steps = prefixes._step, []

        def counted(waiting: Any) -> bool:
            steps.append(len(waiting.cut))
            return step(waiting)

        monkeypatch.setattr(prefixes, "_step", counted)
        lines = "".join(f"line {n:04}, of as many bytes as any\n" for n in range(100))
        assert (await g.chat(messages=[{"role": "user", "content": lines}])).status_code == 200
        await until(lambda: prefixes.idle and len(steps) > 0)
        assert steps == [*range(101), 100], "a phrase a step, then the end of them is seen, then it is judged"
        assert prefixes.families.samples == 1


async def test_a_body_of_odd_shape_is_judged_like_any_other(sim: Fleet) -> None:
    async with running(*sim.urls, **LOOKING) as g:
        prefixes = g.gateway.prefixes
        assert prefixes is not None
        body = {"model": "sim", "prompt": [list(range(1000)), "x" * 900], "tools": {"a": "b" * 400}, "max_tokens": 1}
        for _ in range(3):
            assert isinstance(await g.http.post("/v1/completions", json=body), httpx.Response)
        await until(lambda: prefixes.idle)
        assert prefixes.families.samples == 3


def test_what_was_spent_delays_the_next_look_by_its_share() -> None:
    prefixes = Prefixes(PrefixesTable(cpu_share=0.01))
    before = time.monotonic()
    prefixes.spent(1.5)  # of the 3 s that may go at a share of 0.15
    after, first = time.monotonic(), prefixes._next_at
    assert before + 10.0 <= first <= after + 10.0
    prefixes.spent(2.0)
    assert prefixes._next_at == pytest.approx(first + 200.0)
    assert prefixes.cpu_s == 3.5
