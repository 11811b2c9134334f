"""Provenance: what the replica says is kept, what may be a secret is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests import provenance
from tests.loadtests.scripted import Call, scripted

CAPTURES = Path(__file__).resolve().parent.parent / "captures"


@pytest.mark.parametrize(("argv", "shown"), [
    (["/opt/bin/forebay", "replay", "--url", "http://h:1"], "forebay replay --url http://h:1"),
    (["forebay", "--api-key", "abc"], "forebay --api-key ***"),
    (["forebay", "--api-key=abc"], "forebay --api-key=***"),
    (["forebay", "--url", "http://me:pw@h:1"], "forebay --url http://***@h:1"),
    (["forebay", "sk-12345"], "forebay ***"),
])  # fmt: skip
def test_secrets_do_not_reach_the_command_line_kept(argv: list[str], shown: str) -> None:
    assert provenance.command_line(argv) == shown


def test_this_machine_is_described_without_its_name() -> None:
    import platform

    facts = provenance.here(["forebay"])
    assert facts["cores"] >= 1
    assert facts["python"] == platform.python_version()
    assert platform.node() not in {str(v) for v in facts.values()}


def test_cache_facts_come_from_recorded_metrics() -> None:
    facts = provenance.cache_config((CAPTURES / "metrics-sample.txt").read_text())
    assert facts["block_size"] == "32"
    assert facts["enable_prefix_caching"] == "True"


async def test_a_replica_is_asked_and_silence_is_no_error() -> None:
    async def script(call: Call) -> None:
        if call.path == "/version":
            await call.plain(200, {"version": "0.32.0"})
        elif call.path == "/v1/models":
            await call.plain(200, {"data": [{"id": "tiny", "max_model_len": 8192, "permission": []}]})
        else:
            await call.plain(404, {"detail": "Not Found"})

    async with scripted(script) as server:
        facts = await provenance.replica(server.url + "/v1")
    assert facts == {"version": "0.32.0", "models": [{"id": "tiny", "max_model_len": 8192}]}


def test_active_switches_are_read_from_server_info() -> None:
    info = {"vllm_config": {"scheduler_config": {"max_num_seqs": 32, "policy": "fcfs"}, "speculative_config": None}}
    assert provenance.optimisations(info) == {"max_num_seqs": 32, "policy": "fcfs"}


def test_a_facts_file_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text("[1]")
    with pytest.raises(provenance.FactsError, match="holds a list; a JSON object would be right"):
        provenance.facts_file(path)
