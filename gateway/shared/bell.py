"""Tells the other gateways to look at once, when a long prefill was sent somewhere.

What two gateways send in the tenth of a second before they hear of each other does harm where both choose the same
replica for a long prompt: so whoever sends one exchanges registers at once, and rings. Who hears it reads the registers
then, and not at its next turn. A ring is a message of Redis that is kept nowhere; a gateway that misses one, or hears
none since its connection is gone, is as it would be without, a turn late. Trade-off: one exchange more for each long
prefill at each gateway, at most every `SOONEST_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from redis.exceptions import RedisError

from gateway.lost_cancel import told_to_end
from gateway.shared.store import Command, Store

SOONEST_S = 0.005  # between two exchanges
AGAIN_S = 1.0  # between two tries to listen
log = logging.getLogger("forebay.shared")


class Bell:
    """`heard` is called for each ring of another gateway."""

    def __init__(self, store: Store, me: str, heard: Callable[[], None]) -> None:
        self._store = store
        self._me = me
        self._heard = heard
        self._name = store.key("bell")

    def ring(self) -> Command:
        return ("PUBLISH", self._name, self._me)

    async def listen(self) -> None:
        """Until it is cancelled."""
        while not told_to_end():
            if self._store.up:
                try:
                    await self._listen()
                except (RedisError, OSError, TimeoutError) as error:
                    log.debug("no more rings are heard: %r", error)
            await asyncio.sleep(AGAIN_S)

    async def _listen(self) -> None:
        async with self._store.subscription() as subscription:
            await subscription.subscribe(self._name)
            self._heard()  # it may have rung before
            while self._store.up and not told_to_end():
                message = await subscription.get_message(ignore_subscribe_messages=True, timeout=AGAIN_S)
                if message is not None and message["data"] != self._me.encode():
                    self._heard()
