"""Replicas from a real name server: records that change, expire, fail and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset
import pytest
from pydantic import ValidationError

from gateway.discovery.membership import Member
from gateway.discovery.names import Names
from gateway.discovery.report import Report
from gateway.discovery.tables import DnsSource
from tests.gateway.running import until


class NameServer(asyncio.DatagramProtocol):
    """Answers from `zone`: (name, type) to a TTL and records. A name that is not there is NXDOMAIN."""

    def __init__(self) -> None:
        self.zone: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self.asked: list[tuple[str, str]] = []
        self.fails: set[str] = set()  # types answered with SERVFAIL
        self.silent = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    @property
    def address(self) -> str:
        return "{}:{}".format(*self.transport.get_extra_info("sockname")[:2])

    def datagram_received(self, data: bytes, addr: Any) -> None:
        query = dns.message.from_wire(data)
        (question,) = query.question
        name, kind = question.name.to_text().rstrip("."), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind))
        if self.silent:
            return
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        if kind in self.fails:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif (name, kind) in self.zone:
            ttl, records = self.zone[name, kind]
            answer.answer.append(dns.rrset.from_text(question.name, ttl, "IN", kind, *records))
        elif not any(known == name for known, _ in self.zone):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self.transport.sendto(answer.to_wire(), addr)


@dataclass
class Resolved:
    server: NameServer
    report: Report
    told: list[dict[str, Member]] = field(default_factory=list)

    @property
    def urls(self) -> list[str]:
        return [m.table.url for m in self.told[-1].values()] if self.told else []

    async def becomes(self, *urls: str) -> None:
        await until(lambda: self.urls == list(urls))


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    transport, made = await asyncio.get_running_loop().create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    yield made
    transport.close()


@asynccontextmanager
async def resolving(server: NameServer, *names: str, **settings: Any) -> AsyncIterator[Resolved]:
    table = DnsSource(
        names=list(names),
        servers=[server.address],
        **{"ttl_min_s": 0.01, "ttl_max_s": 0.02, "timeout_s": 5.0, **settings},
    )
    told: list[dict[str, Member]] = []
    report = Report("dns", lambda members: told.append({m.table.name: m for m in members}))
    task = asyncio.create_task(Names(table).run(report))
    try:
        yield Resolved(server, report, told)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_each_address_of_a_name_is_a_replica_and_changes_are_followed(server: NameServer) -> None:
    server.zone["vllm.test", "A"] = (1, ["10.0.0.2", "10.0.0.1"])
    async with resolving(server, "http://vllm.test:8000/base") as r:
        await r.becomes("http://10.0.0.1:8000/base", "http://10.0.0.2:8000/base")
        server.zone["vllm.test", "A"] = (1, ["10.0.0.2", "10.0.0.3"])
        await r.becomes("http://10.0.0.2:8000/base", "http://10.0.0.3:8000/base")


async def test_ipv6_is_used_where_there_is_no_ipv4_or_both_where_that_is_wanted(server: NameServer) -> None:
    server.zone["six.test", "AAAA"] = (1, ["fd00::5"])
    server.zone["dual.test", "A"] = (1, ["10.0.0.1"])
    server.zone["dual.test", "AAAA"] = (1, ["fd00::1"])
    names = ("http://six.test:8000", "http://dual.test:8000")
    async with resolving(server, *names) as r:
        await r.becomes("http://[fd00::5]:8000", "http://10.0.0.1:8000")  # a dual pod is one replica
    async with resolving(server, *names, families="both") as r:
        await r.becomes("http://[fd00::5]:8000", "http://10.0.0.1:8000", "http://[fd00::1]:8000")


async def test_targets_of_the_best_priority_are_used_with_their_weights(server: NameServer) -> None:
    server.zone["_vllm._tcp.test", "SRV"] = (
        1,
        ["10 100 8001 gpu-1.test.", "10 50 8000 gpu-0.test.", "20 100 8000 spare.test."],
    )
    async with resolving(server, "srv+https://_vllm._tcp.test") as r:
        await r.becomes("https://gpu-0.test:8000", "https://gpu-1.test:8001")
        assert {name: m.table.weight for name, m in r.told[-1].items()} == {
            "gpu-0.test:8000": 0.5,
            "gpu-1.test:8001": 1,
        }
        server.zone["_vllm._tcp.test", "SRV"] = (1, ["20 0 8000 spare.test."])
        await r.becomes("https://spare.test:8000")


async def test_a_name_is_looked_up_again_when_its_record_expires_and_not_before(server: NameServer) -> None:
    server.zone["short.test", "A"] = (0, ["10.0.0.1"])
    server.zone["long.test", "A"] = (3600, ["10.0.0.2"])
    async with resolving(server, "http://short.test", "http://long.test", ttl_max_s=3600.0) as r:
        await r.becomes("http://10.0.0.1", "http://10.0.0.2")
        asked = server.asked.count(("short.test", "A"))
        await until(lambda: server.asked.count(("short.test", "A")) >= asked + 5)
        assert server.asked.count(("long.test", "A")) == 1
        assert r.urls == ["http://10.0.0.1", "http://10.0.0.2"]


@pytest.mark.parametrize("fault", ["nobody", "nxdomain", "servfail", "silent"])
async def test_a_name_server_that_fails_or_names_nobody_leaves_the_replicas_as_they_are(
    server: NameServer, fault: str
) -> None:
    server.zone["vllm.test", "A"] = (0, ["10.0.0.1"])
    # only who is silent is waited for in vain: from the others an answer comes, however late on a busy machine
    async with resolving(server, "http://vllm.test:8000", timeout_s=0.3 if fault == "silent" else 20.0) as r:
        await r.becomes("http://10.0.0.1:8000")
        if fault == "nobody":
            server.zone["vllm.test", "TXT"] = server.zone.pop(("vllm.test", "A"))
        elif fault == "nxdomain":
            server.zone.clear()
        elif fault == "servfail":
            server.fails |= {"A", "AAAA"}
        else:
            server.silent = True
        failures = r.report.failures
        await until(lambda: r.report.failures >= failures + 2)
        said = {"silent": "vllm.test: the name server does not answer", "servfail": "SERVFAIL"}
        assert said.get(fault, "vllm.test: names nobody") in (r.report.trouble or "")
        assert r.urls == ["http://10.0.0.1:8000"]
        server.fails.clear()
        server.silent = False
        server.zone["vllm.test", "A"] = (0, ["10.0.0.7"])
        await r.becomes("http://10.0.0.7:8000")
        await until(lambda: r.report.trouble is None)


async def test_one_family_that_fails_keeps_what_it_said(server: NameServer) -> None:
    server.zone["dual.test", "A"] = (0, ["10.0.0.1"])
    server.zone["dual.test", "AAAA"] = (0, ["fd00::1"])
    async with resolving(server, "http://dual.test", families="both") as r:
        await r.becomes("http://10.0.0.1", "http://[fd00::1]")
        server.fails.add("AAAA")
        server.zone["dual.test", "A"] = (0, ["10.0.0.2"])
        await r.becomes("http://10.0.0.2", "http://[fd00::1]")


async def test_a_name_without_an_answer_yet_does_not_keep_the_others_waiting(server: NameServer) -> None:
    server.zone["here.test", "A"] = (1, ["10.0.0.1"])
    whole: list[bool] = []
    async with resolving(server, "http://here.test", "http://late.test") as r:
        r.report.heard = lambda: whole.append(True)
        await r.becomes("http://10.0.0.1")
        assert whole == []
        server.zone["late.test", "A"] = (1, ["10.0.0.2"])
        await r.becomes("http://10.0.0.1", "http://10.0.0.2")
        assert whole


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"names": ["https://vllm.test"]}, "must be http, or srv.https"),
        ({"names": ["srv+http://vllm.test:8000"]}, "must not have a port"),
        ({"names": ["vllm.test"]}, "must be http://NAME:PORT"),
        ({"servers": ["ns.test"]}, "must be ADDRESS, ADDRESS:PORT or"),
        ({"servers": ["10.0.0.1:99999"]}, "Port out of range"),
    ],
)
def test_names_that_cannot_work_are_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DnsSource(**table)


def test_name_servers_with_and_without_a_port() -> None:
    assert DnsSource(servers=["10.0.0.2", "10.0.0.2:5353", "fd00::2", "[fd00::2]:5353"]).servers
