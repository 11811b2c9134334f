from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], uvloop.Loop]]:
    """The gateway runs on uvloop, so its tests do."""
    return {"uvloop": uvloop.new_event_loop}
