"""A blocked event loop shows; a quiet one does not."""

from __future__ import annotations

import time

from gateway.lag import LoopLag
from tests.gateway.scripted import until


async def test_a_call_that_blocks_the_loop_is_measured_once() -> None:
    lag = LoopLag()
    lag.start()
    try:
        time.sleep(0.3)  # noqa: ASYNC251 - blocking is what is measured: the timer was due after 0.1 s
        await until(lambda: lag.mean_s > 0.0)
        assert lag.worst_s() >= 0.19
        assert lag.worst_s() == 0.0
    finally:
        lag.stop()
