"""The control plane as an operator uses it: who may, what changes, and that a mistake changes nothing."""

from __future__ import annotations

import asyncio
import io
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from gateway import banner
from gateway.endpoints import ALLOW
from loadtests.faults import Command
from loadtests.replica import Fleet, ReplicaSettings
from tests.gateway.running import Running, running, until


@pytest.fixture
async def sim() -> AsyncIterator[Fleet]:
    async with Fleet.of(ReplicaSettings(time_scale=20.0), 2) as fleet:
        yield fleet


def peer(g: Running, host: str) -> httpx.AsyncClient:
    """A client that the control plane sees under this address."""
    transport = httpx.ASGITransport(app=g.gateway.admin, client=(host, 50000))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080")


# -- who -----------------------------------------------------------------------------------------------------------


async def test_without_a_token_only_loopback_is_answered() -> None:
    async with running() as g, peer(g, "127.0.0.1") as here, peer(g, "10.0.0.9") as there:
        assert (await here.get("/admin/fleet")).status_code == 200
        assert (await there.get("/admin/fleet")).status_code == 403
        assert (await there.get("/ready")).status_code == 503


@pytest.mark.parametrize(
    "header",
    [
        {"x-forwarded-for": "10.0.0.9"},  # through a proxy on this host
        {"forwarded": "for=10.0.0.9"},
        {"host": "evil.example"},  # a name made to resolve to loopback
        {"host": "["},
        {"origin": "http://evil.example"},  # a web page that posts to it
    ],
    ids=str,
)
async def test_loopback_that_only_looks_local_is_refused(header: dict[str, str]) -> None:
    async with running() as g, peer(g, "127.0.0.1") as here:
        assert (await here.get("/admin/fleet", headers=header)).status_code == 403
        assert (await here.get("/admin/fleet", headers={"origin": "http://127.0.0.1:8080"})).status_code == 200


async def test_with_a_token_everyone_needs_it() -> None:
    async with running(environ={"FOREBAY_ADMIN_TOKEN": "s3cret"}) as g:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "Basic s3cret"}, 401),
            ({"authorization": "Bearer s3cret"}, 200),
        ):
            assert (await g.http.get("/admin/fleet", headers=headers)).status_code == status


async def test_metrics_have_a_token_of_their_own() -> None:
    async with running(environ={"SCRAPE": "m3trics"}, metrics={"token_env": "SCRAPE"}) as g:
        assert (await g.http.get("/metrics")).status_code == 401
        page = await g.http.get("/metrics", headers={"authorization": "Bearer m3trics"})
        assert page.status_code == 200
        assert "forebay_config_version 1.0" in page.text


# -- fleet ---------------------------------------------------------------------------------------------------------


async def test_a_replica_is_added_drained_taken_back_and_removed(sim: Fleet) -> None:
    async with running(sim.urls[0]) as g:
        added = await g.http.post("/admin/fleet", json={"url": sim.urls[1], "id": "new"})
        assert added.json() == {"version": 2, "changed": [f"replicas.new: added at {sim.urls[1]}"]}
        await until(lambda: g.gateway.fleet.available("new"))
        await g.http.post("/admin/drain/r0")
        assert {(await g.chat()).headers["x-forebay-replica"] for _ in range(4)} == {"new"}
        rows = {row["id"]: row for row in (await g.http.get("/admin/fleet")).json()}
        assert (rows["r0"]["draining"], rows["r0"]["available"], rows["new"]["models"]) == (True, False, ["sim"])
        await g.http.post("/admin/drain/r0?draining=false")
        assert g.gateway.fleet.available("r0")
        assert (await g.http.delete("/admin/fleet/new")).json()["changed"] == ["replicas.new: removed"]
        assert list(g.gateway.fleet.replicas) == ["r0"]


async def test_paths_methods_and_answers_that_are_not_there_are_said() -> None:
    async with running("http://127.0.0.1:9", ready=False) as g:
        nowhere = await g.http.get("/admin/flet")
        method = await g.http.post("/admin/status")
        maybe = await g.http.post("/admin/drain/r0?draining=maybe")
        half = await g.http.post("/admin/fleet", content=b'{"url"', headers={"content-type": "application/json"})
    assert (nowhere.status_code, nowhere.json()) == (
        404, {"errors": ["GET /admin/flet: there is no such path; GET /admin lists those that there are"]}
    )  # fmt: skip
    assert (method.status_code, method.json()) == (
        405, {"errors": ["POST /admin/status: this path takes GET; GET /admin lists all"]}
    )  # fmt: skip
    assert (maybe.status_code, maybe.json()) == (422, {"errors": ['?draining = "maybe": must be true or false']})
    assert (half.status_code, half.json()) == (
        422, {"errors": ["body: is no JSON, from byte 6 on; must be a JSON object"]}
    )  # fmt: skip


async def test_unknown_replicas_and_taken_ids_are_said() -> None:
    async with running("http://127.0.0.1:9", ready=False) as g:
        gone = await g.http.delete("/admin/fleet/nobody")
        line = 'replica "nobody" is not known; GET /admin/fleet lists those that are'
        assert (gone.status_code, gone.json()) == (404, {"errors": [line]})
        assert (await g.http.post("/admin/drain/nobody")).status_code == 404
        twice = await g.http.post("/admin/fleet", json={"url": "http://b:1", "id": "r0"})
        assert twice.json() == {"errors": ['replicas[1].id = "r0": is taken by replicas[0]; give it another id']}


# -- policy and settings -------------------------------------------------------------------------------------------


async def test_the_policy_is_switched_under_traffic(sim: Fleet) -> None:
    async with running(*sim.urls) as g:
        assert (await g.chat()).headers["x-forebay-reason"] == "turn"
        switched = await g.http.put("/admin/policy", json={"name": "least_request", "clear_index": True})
        assert switched.json()["changed"] == ["policy.name: round_robin -> least_request", "prefix index: cleared"]
        assert (await g.http.get("/admin/policy")).json()["name"] == "least_request"
        assert (await g.chat()).headers["x-forebay-reason"] != "turn"


async def test_classes_and_limits_are_read_and_changed_at_run_time(sim: Fleet) -> None:
    async with running(*sim.urls) as g:
        changed = await g.http.patch("/admin/config/classes", json={"gold": {"ttft_s": 0.5}})
        assert changed.json()["changed"] == ["classes.gold: added"]
        assert (await g.http.get("/admin/config/classes")).json()["gold"]["ttft_s"] == 0.5
        body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        answer = await g.http.post("/v1/chat/completions", json=body, headers={"x-service-class": "gold"})
        assert answer.status_code == 200
        await g.http.patch("/admin/config/limits", json={"max_body_bytes": 10})
        assert (await g.chat()).status_code == 413


async def test_pacing_is_changed_in_the_running_core() -> None:
    async with running(policy={"name": "forebay", "seed": 1}) as g:
        assert g.gateway.balancer.settings.pace is None
        await g.http.patch("/admin/config/pacing", json={"prefill_share": 0.6})
        assert g.gateway.balancer.settings.pace == 0.6
        await g.http.patch("/admin/config/pacing", json={"enabled": False})
        assert g.gateway.balancer.settings.pacing is False


async def test_a_mistake_changes_nothing_and_says_where_it_is() -> None:
    async with running() as g:
        before = g.gateway.control.config
        patch = {"pacing": {"prefill_share": 0.6}, "limits": {"max_body_bytes": "big"}, "wrong": 1}
        refused = await g.http.patch("/admin/config", json=patch)
        assert (refused.status_code, refused.json()["errors"]) == (
            400,
            [
                'limits.max_body_bytes = "big": must be a whole number',
                "wrong: unknown key; the nearest valid one is working_set",
            ],
        )
        assert g.gateway.control.config is before
        assert g.gateway.balancer.settings.pace is None
        missing = {"tenants": {"a": {"keys_env": ["NOT_SET"]}}, "pacing": {"prefill_share": 0.6}}
        assert (await g.http.patch("/admin/config", json=missing)).status_code == 400
        assert g.gateway.control.config is before
        assert not g.gateway.proxy.tenants.configured


@pytest.mark.parametrize("spaces", [70_000, 1_000_000])
async def test_a_large_change_arrives_whole(spaces: int) -> None:
    """More than one read of the socket, and more than reading stops at until somebody takes it."""
    async with running() as g:
        body = b" " * spaces + b'{"pacing": {"enabled": false}}'
        answer = await g.http.patch("/admin/config", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200
        assert g.gateway.control.config.pacing.enabled is False


@pytest.mark.parametrize(
    "body",
    [
        b'{"policy": {"seed": 1e400}}',
        b'{"policy": {"seed": NaN}}',
        b'{"policy": {"seed": 99999999999999999999999}}',
        b'{"limits": {"held_requests": 9223372036854775808}}',
        b'{"model_classes": {"\\ud800": "standard"}}',
        b"[" * 1000 + b"]" * 1000,
        b"[" * 100_000,
        b"5",
        b"\xff",
    ],
    ids=lambda body: repr(body[:40]),
)
async def test_json_that_could_not_be_shown_again_is_refused_in_words(body: bytes) -> None:
    async with running() as g:
        answer = await g.http.patch("/admin/config", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 422)
        assert answer.json()["errors"]
        assert len(g.gateway.control.versions) == 1


async def test_a_change_that_never_ends_is_408() -> None:
    async with running(limits={"body_timeout_s": 0.1}) as g:
        reader, writer = await asyncio.open_connection(g.http.base_url.host, g.http.base_url.port)
        writer.write(b"PATCH /admin/config HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 29\r\n\r\nhalf")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_rollback_returns_one_version_and_then_the_one_before() -> None:
    async with running() as g:
        for share in (0.5, 0.6):
            await g.http.patch("/admin/config/pacing", json={"prefill_share": share})
        assert (await g.http.post("/admin/rollback")).json()["changed"] == ["pacing.prefill_share: 0.6 -> 0.5"]
        assert (await g.http.post("/admin/rollback")).json()["changed"] == ["pacing.prefill_share: 0.5 -> none"]
        nothing = await g.http.post("/admin/rollback")
        assert nothing.json() == {"errors": ["there is no earlier configuration to return to"]}
        assert [row["why"] for row in (await g.http.get("/admin/versions")).json()] == ["admin: rollback"]


async def test_key_hashes_and_tokens_are_not_shown() -> None:
    tenants = {"a": {"keys_sha256": ["0" * 64]}}
    async with running(tenants=tenants, environ={"FOREBAY_ADMIN_TOKEN": "s3cret"}) as g:
        shown = (await g.http.get("/admin/config", headers={"authorization": "Bearer s3cret"})).text
        assert "0" * 64 not in shown
        assert "s3cret" not in shown


async def test_changes_leave_a_line_in_the_audit_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forebay.audit")
    async with running() as g:
        await g.http.patch("/admin/config/pacing", json={"enabled": False})
        await g.http.patch("/admin/v1/config/pacing", json={"enabled": 3})
        newest, oldest = (await g.http.get("/admin/audit")).json()
    assert "pacing changed by loopback from 127.0.0.1: pacing.enabled: true -> false" in caplog.text
    assert (oldest["who"], oldest["refused"]) == ("loopback", False)
    assert (newest["what"], newest["changed"], newest["refused"]) == (
        "PATCH /admin/config/pacing",
        ["pacing.enabled = 3: must be true or false"],
        True,
    )


async def test_a_change_that_is_refused_for_its_form_or_its_path_leaves_a_line_too() -> None:
    """As `curl -d` sends it, then with its content type, then for what is not there; reading leaves none."""
    async with running() as g:
        form = {"content-type": "application/x-www-form-urlencoded"}
        as_form = await g.http.post("/admin/fleet", content=b'{"url": "http://b:1"}', headers=form)
        a_list = await g.http.post("/admin/fleet", json=["http://b:1"])
        await g.http.post("/admin/drain/nobody")
        unread = await g.http.get("/admin/config/pace")
        lines = (await g.http.get("/admin/audit")).json()
    said = 'content-type = "application/x-www-form-urlencoded": must be application/json, and the body a JSON object'
    assert (as_form.status_code, as_form.json()) == (422, {"errors": [said]})
    assert (a_list.status_code, a_list.json()) == (422, {"errors": ["body: must be a JSON object"]})
    assert unread.json() == {"errors": ['table "pace" is not known; GET /admin/config lists those that are']}
    assert [(line["what"], line["refused"]) for line in reversed(lines)] == [
        ("POST /admin/fleet", True), ("POST /admin/fleet", True), ("POST /admin/drain/nobody", True),
    ]  # fmt: skip


async def test_each_token_has_a_name_that_the_audit_line_gives(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forebay.audit")
    environ = {"FOREBAY_ADMIN_TOKEN": "s3cret", "DEPLOYER_TOKEN": "d3ploy", "EMPTY": ""}
    named = {"tokens_env": {"deployer": "DEPLOYER_TOKEN", "nobody": "EMPTY"}}
    async with running(environ=environ, admin=named) as g:
        for token, status in (("s3cret", 200), ("d3ploy", 200), ("wrong", 401), ("EMPTY", 401)):
            answer = await g.http.post("/admin/rollback", headers={"authorization": f"Bearer {token}"})
            assert answer.status_code == (status if status == 401 else 400)
    assert "POST /admin/rollback refused by admin from 127.0.0.1: there is no earlier" in caplog.text
    assert "POST /admin/rollback refused by deployer from 127.0.0.1: there is no earlier" in caplog.text
    assert "d3ploy" not in caplog.text


# -- the file ------------------------------------------------------------------------------------------------------


async def test_reload_takes_the_file_again_or_leaves_everything(tmp_path: Path, sim: Fleet) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text("[stream]\ncommit_after_s = 5.0\n")
    async with running(*sim.urls, file=file) as g:
        stays = g.gateway.fleet.replicas["r0"]
        file.write_text('[stream]\ncommit_after_s = 7.0\n[tenants.a]\nkeys_sha256 = ["' + "0" * 64 + '"]\n')
        reloaded = await g.http.post("/admin/reload")
        assert reloaded.json()["changed"] == ["stream.commit_after_s: 5.0 -> 7.0", "tenants.a: added"]
        assert (await g.chat()).status_code == 401
        assert g.gateway.fleet.replicas["r0"] is stays  # its connections, health and ledger too
        file.write_text("[stream]\ncommit_after_s = 'x'\n")
        refused = await g.http.post("/admin/reload")
        assert refused.json() == {"errors": ['stream.commit_after_s = "x": must be a number']}
        assert g.gateway.proxy.config.stream.commit_after_s == 7.0


async def test_reload_says_first_what_waits_for_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forebay.control")
    file = tmp_path / "gateway.toml"
    file.write_text("")
    async with running(file=file) as g:
        file.write_text("[stream]\ncommit_after_s = 7.0\n[listen]\nbacklog_connections = 7\n")
        reloaded = await g.http.post("/admin/reload")
    waits = "listen.backlog_connections: 2048 -> 7 (at the next start, if the file has it)"
    assert reloaded.json()["changed"][0] == waits
    told, applied = [r.getMessage() for r in caplog.records if r.name == "forebay.control"][-2:]
    assert told == f"not in effect yet: {waits}"
    assert "applied" in applied
    assert "backlog" not in applied


async def test_reload_without_a_file_says_so() -> None:
    async with running() as g:
        answer = await g.http.post("/admin/reload")
        assert answer.json() == {"errors": ["there is no file to read again: the gateway was started without --config"]}


async def test_a_replica_taken_from_the_file_is_gone_and_its_open_stream_ends_whole(tmp_path: Path, sim: Fleet) -> None:
    async with running(*sim.urls, health={"hang_s": 60.0}) as g:
        for member in sim.members:
            member.order(Command("hang"))
        answers = [asyncio.create_task(g.chat(stream=True, max_tokens=20)) for _ in range(2)]
        await until(lambda: sum(len(e.record.attempts) for e in g.gateway.proxy.live) == 2)
        await g.http.delete("/admin/fleet/r0")
        for member in sim.members:
            member.order(Command("clear"))
        texts = [(await answer).text for answer in answers]
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        await until(lambda: g.gateway.fleet.get("r0") is None)


async def test_the_documentation_of_the_control_plane_is_there_and_asks_no_other_host() -> None:
    async with running() as g:
        page = await g.http.get("/docs")
        document = await g.http.get("/openapi.json")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for answer in (page, document):
        assert re.findall(r"(?:https?:)?//(?!10\.0\.0\.)[\w.-]+", answer.text) == []  # an example has an address
    assert "<script" not in page.text
    paths = document.json()["paths"]
    assert "/admin/rollback" in paths
    assert [path for path in [*paths, *ALLOW] if path not in page.text] == []


async def test_admin_by_itself_says_what_is_below_it() -> None:
    async with running() as g:
        index = (await g.http.get("/admin")).json()
        assert (await g.http.get("/admin/v1")).json() == index
    assert index["dashboard"] == "/dashboard"
    assert index["paths"]["POST /admin/rollback"] == "Returns to the configuration before this one."
    assert [path for path, about in index["paths"].items() if not about.endswith(".")] == []


async def test_every_address_of_the_banner_answers() -> None:
    async with running() as g:
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(banner.greeting(g.gateway, g.url))
        told = re.findall(rf"{g.url}(/\w+)", console.export_text())
        assert told == ["/admin", "/dashboard", "/docs", "/metrics", "/ready"]
        assert [p for p in told if (await g.http.get(p)).status_code == 404] == []


async def test_the_banner_s_line_to_try_it_with_carries_a_key_where_one_is_needed() -> None:
    key = "-H 'authorization: Bearer KEY' "
    async with running() as g:
        assert key not in banner.example(g.gateway, g.url)
    async with running(tenants={"a": {"keys_sha256": ["0" * 64]}}) as g:
        assert f"/v1/chat/completions {key}-H 'content-type" in banner.example(g.gateway, g.url)


async def test_a_path_that_is_not_there_names_those_that_are() -> None:
    async with running() as g:
        answer = await g.http.get("/")
    assert answer.status_code == 404
    for path in ("/dashboard", "/docs", "/v1/"):
        assert path in answer.json()["error"]["message"]
