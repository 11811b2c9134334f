"""The public traces themselves, where FOREBAY_TRACES names their folder: figures their README publishes."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from loadtests.reuse import ceiling
from loadtests.source import Generator, Source, thin
from loadtests.traces import read
from loadtests.workloads import CLASSES

FOLDER = os.environ.get("FOREBAY_TRACES")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="FOREBAY_TRACES names no folder of public traces")


def trace(name: str) -> Source:
    found = read(Path(FOLDER or "") / name)
    assert isinstance(found, Source)
    return found


def test_mooncake_has_its_rows_ticks_and_reuse() -> None:
    found = trace("mooncake_conversation_000-045min.jsonl.gz")
    assert (len(found.rows), found.tick_s, found.block_tokens) == (8940, 3.0, 512)
    assert found.sha256 == "bb299fb0d911bf73f682599542fbd74d61d64012d6777fbb5d77acbbbb318ae2"
    assert found.span_s == pytest.approx(2700.0, abs=3.0)
    assert ceiling(found.rows, 512) == pytest.approx(0.361, abs=0.002)
    assert ceiling(found.rows, 512, 8) == pytest.approx(0.133, abs=0.003)


def test_mooncake_thinned_by_group_keeps_its_reuse() -> None:
    whole = trace("mooncake_conversation_000-045min.jsonl.gz")
    kept = thin(whole, 0.1)
    assert 0.05 < len(kept.rows) / len(whole.rows) < 0.15
    found = ceiling(kept.rows, 512)
    assert found is not None
    assert found > 0.28  # dropping single requests instead leaves 0.125


def test_azure_has_its_rate_and_quantiles() -> None:
    found = trace("azure_llm_2023_conv.csv.gz")
    assert (len(found.rows), round(found.rate_rps, 2)) == (19366, 5.53)
    prompts = sorted(r.prompt_tokens for r in found.rows)
    assert (prompts[len(prompts) // 2], prompts[-1]) == (1020, 14050)
    assert len(trace("azure_llm_2023_code.csv.gz").rows) == 8819


def test_weka_sessions_reuse_what_their_readme_says() -> None:
    found = trace("weka_agentic_sessions.jsonl.gz")
    assert len({r.session for r in found.rows}) > 380
    share = ceiling(found.rows, 64)
    assert share is not None
    assert share > 0.93


def test_servegen_clients_make_bursts() -> None:
    found = read(Path(FOLDER or "") / "servegen_clients_day1.csv.gz")
    assert isinstance(found, Generator)
    rows = found.cut(0, 1.0, 600.0, 60.0, CLASSES).cohort
    spread = []
    for client in {r.tenant for r in rows}:
        times = [r.at_s or 0.0 for r in rows if r.tenant == client]
        gaps = [b - a for a, b in pairwise(times)]
        if len(gaps) >= 50:
            mean = fmean(gaps)
            spread.append(pstdev(gaps) / mean)
    assert max(spread) > 1.5  # coefficient of variation between arrivals of one client; 1 is Poisson


def test_a_cut_of_the_trace_has_the_same_bytes_everywhere() -> None:
    cut = trace("mooncake_conversation_000-045min.jsonl.gz").cut(1, 2.0, 300.0, 100.0, CLASSES)
    assert cut.sha256[:16] == PINNED


PINNED = "608ed281c633ef84"
