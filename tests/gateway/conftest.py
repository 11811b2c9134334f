"""For all of the gateway's tests: its own event loop, and two simulated replicas for those of whole processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop

from tests.simulated import Simulated, simulated


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], uvloop.Loop]]:
    """The gateway runs on uvloop, so its tests do."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """A process of two, for a module."""
    with simulated(tmp_path_factory.mktemp("replicas"), 2) as running:
        yield running
