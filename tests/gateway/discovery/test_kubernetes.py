"""The list and the watch against an API server that forgets, breaks off, misses deletes and rotates tokens."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.discovery.kubernetes import Kubernetes
from gateway.discovery.membership import Member
from gateway.discovery.report import Report
from gateway.discovery.tables import KubernetesSource
from tests.gateway.discovery.apiserver import ApiServer, api_server, endpoint, slice_of
from tests.gateway.running import until
from tests.gateway.test_proxy import certificate

A, B = endpoint("vllm-a", "10.244.1.5", "uid-a"), endpoint("vllm-b", "10.244.2.7", "uid-b")


@dataclass
class Watching:
    report: Report
    told: list[list[Member]] = field(default_factory=list)

    @property
    def ready(self) -> list[str]:
        return [m.table.name for m in self.told[-1] if m.ready] if self.told else []

    async def becomes(self, *names: str) -> None:
        await until(lambda: self.told and self.ready == list(names))  # type: ignore[arg-type,return-value]


@asynccontextmanager
async def watching(api: ApiServer, **settings: Any) -> AsyncIterator[Watching]:
    keys = {"selector": "kubernetes.io/service-name=vllm", "namespace": "inference", "port": "http"}
    table = KubernetesSource(**{**keys, "api_url": api.url, "token_file": "/gone", "retry_max_s": 0.05, **settings})
    told: list[list[Member]] = []
    report = Report("kubernetes", lambda members: told.append(list(members)))
    task = asyncio.create_task(Kubernetes(table).run(report))
    try:
        yield Watching(report, told)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_list_and_then_every_change(tmp_path: Path) -> None:
    async with api_server() as api:
        api.put(slice_of(A))
        async with watching(api) as w:
            await w.becomes("vllm-a")
            await until(lambda: api.watched)
            api.put(slice_of(A, B))
            await w.becomes("vllm-a", "vllm-b")
            api.put(slice_of(endpoint("vllm-c", "10.244.3.9", "uid-c"), name="vllm-second"))
            await w.becomes("vllm-a", "vllm-b", "vllm-c")
            api.delete()
            await w.becomes("vllm-c")
            assert api.lists == 1
            assert api.asked[0] == {"labelSelector": ["kubernetes.io/service-name=vllm"]}
            assert api.asked[1]["allowWatchBookmarks"] == ["true"]
            assert w.told[-1][0].table.url == "http://10.244.3.9:8000"


async def test_a_watch_that_breaks_is_taken_up_where_it_was_and_misses_nothing() -> None:
    async with api_server() as api:
        api.put(slice_of(A))
        async with watching(api) as w:
            for drop in (api.drop, lambda: api.drop('{"type":"MODIF'), api.end):
                await until(lambda: api.watched)
                api.put(slice_of(A))
                await until(lambda: len(w.told) >= 2 and w.ready == ["vllm-a"])
                drop()
                api.put(slice_of(A, B), told=False)
                api._event("MODIFIED", api.slices["vllm-abc12"], True)  # while nobody watches
                await w.becomes("vllm-a", "vllm-b")
                api.put(slice_of(A))
                await w.becomes("vllm-a")
            assert api.lists == 1


async def test_a_bookmark_moves_the_version_on() -> None:
    async with api_server() as api:
        api.put(slice_of(A))
        async with watching(api) as w:
            await until(lambda: api.watched)
            api.bookmark()
            await until(lambda: w.report.read_at is not None)
            api.put(slice_of(A, B))
            await w.becomes("vllm-a", "vllm-b")
            api.bookmark()
            at = api.version
            api.end()
            await until(lambda: api.watches[-1] == at)


async def test_a_version_that_is_gone_leads_to_a_new_list_in_both_ways_it_is_said() -> None:
    async with api_server() as api:
        api.put(slice_of(A))
        async with watching(api) as w:
            await until(lambda: api.watched)
            api.put(slice_of(B), told=False)
            api.expire()  # as an event of the running watch
            await w.becomes("vllm-b")
            assert api.lists == 2
            await until(lambda: api.watched)
            api.put(slice_of(A), told=False)
            api.oldest = api.version + 1  # as the status of the next watch
            api.end()
            await until(lambda: api.lists >= 3)
            api.oldest = 0
            await w.becomes("vllm-a")


async def test_a_delete_that_the_watch_missed_is_repaired_by_the_next_list() -> None:
    async with api_server() as api:
        api.put(slice_of(A))
        api.put(slice_of(B, name="vllm-second"))
        async with watching(api, relist_s=0.3) as w:
            await w.becomes("vllm-a", "vllm-b")
            await until(lambda: api.watched)
            api.delete("vllm-second", told=False)
            await until(lambda: api.watched)
            async with asyncio.timeout(60):
                while w.ready != ["vllm-a"]:
                    await asyncio.sleep(0.02)
                    api.end()  # as the API server does when timeoutSeconds are over


async def test_while_the_api_server_is_away_nothing_changes_and_then_it_goes_on() -> None:
    async with api_server() as api:
        api.put(slice_of(A))
        async with watching(api) as w:
            await w.becomes("vllm-a")
            await until(lambda: api.watched)
            api.down = True
            api.drop()
            await until(lambda: "503: apiserver is shutting down" in (w.report.trouble or ""))
            await until(lambda: w.report.failures >= 3)
            api.down = False
            api.put(slice_of(A, B))
            await w.becomes("vllm-a", "vllm-b")
            assert all(told for told in w.told)
            await until(lambda: w.report.trouble is None)


async def test_a_token_that_is_rotated_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    async with api_server(token="first") as api:
        api.put(slice_of(A))
        async with watching(api, token_file=str(file)) as w:
            await w.becomes("vllm-a")
            await until(lambda: api.watched)
            api.token = "second"
            api.end()
            await until(lambda: "401" in (w.report.trouble or ""))
            file.write_text("second\n")
            api.put(slice_of(A, B))
            await w.becomes("vllm-a", "vllm-b")


async def test_the_api_server_is_verified_by_the_authority_of_the_cluster(tmp_path: Path) -> None:
    key, cert = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, stranger = certificate(tmp_path / "other")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    async with api_server(tls=tls) as api:
        api.put(slice_of(A))
        async with watching(api, ca_file=str(cert)) as w:
            await w.becomes("vllm-a")
        async with watching(api, ca_file=str(stranger)) as w:
            await until(lambda: "CERTIFICATE_VERIFY_FAILED" in (w.report.trouble or ""))
            assert w.told == []


async def test_what_is_missing_is_said(tmp_path: Path) -> None:
    async with api_server() as api, watching(api, namespace="other") as w:
        await until(lambda: w.report.trouble is not None)
        assert (w.report.trouble or "").endswith("the service account needs get, list and watch of endpointslices")
    table = KubernetesSource(selector="a=b", namespace="x")
    for source, said in (
        (Kubernetes(table, environ={}), "not in a cluster (KUBERNETES_SERVICE_HOST is not set); set api_url"),
        (Kubernetes(table, environ={"KUBERNETES_SERVICE_HOST": "fd00::1"}), "ca.crt: must be a readable PEM file"),
    ):
        report = Report("kubernetes", lambda _: None)
        task = asyncio.create_task(source.run(report))
        await until(lambda: report.trouble is not None)  # noqa: B023
        task.cancel()
        assert said in (report.trouble or "")
    assert Kubernetes(table, environ={"KUBERNETES_SERVICE_HOST": "fd00::1"})._url.startswith(
        "https://[fd00::1]:443/apis/"
    )
