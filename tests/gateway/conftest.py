import asyncio

import pytest
import uvloop


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The gateway runs on uvloop, so its tests do."""
    return uvloop.EventLoopPolicy()
