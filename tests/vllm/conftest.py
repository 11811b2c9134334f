"""Real replicas for the whole session, and a gateway in front of them for each module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import Gateway, gateway
from tests.vllm import replicas as machine
from tests.vllm.replicas import Replicas, scripted


def pytest_configure(config: pytest.Config) -> None:
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        machine.uncaptured = capture.global_and_fixture_disabled


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def started() -> Iterator[Replicas]:
    urls = os.environ.get("FOREBAY_VLLM_URLS")
    scripts = os.environ.get("FOREBAY_VLLM_DIR")
    if urls:
        yield Replicas([url.rstrip("/") for url in urls.replace(",", " ").split()])
    elif scripts:
        replicas = scripted(Path(scripts))
        try:
            replicas.start()
            yield replicas
        finally:
            replicas.script("stop")
    else:
        pytest.skip("needs FOREBAY_VLLM_DIR (scripts that start real vLLM) or FOREBAY_VLLM_URLS")


@pytest.fixture
def replicas(started: Replicas) -> Replicas:
    """Both alive and idle, whatever the test before did to them."""
    started.all_alive()
    return started


@pytest.fixture
def breakable(replicas: Replicas) -> Replicas:
    if not replicas.scripted:
        pytest.skip("replicas given by FOREBAY_VLLM_URLS are not ours to break")
    return replicas


@pytest.fixture
def front(replicas: Replicas, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway with default settings, but open on a machine that is too busy for it."""
    with gateway(replicas.urls, tmp_path) as running:
        yield running
