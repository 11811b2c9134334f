"""What changes often and is told by the core to its hands: whether replicas prefill, and whether requests are held.

Hands sort the gaps of their streams by the first, which matters to sums over many gaps only: told at most every few
milliseconds, and only to a hand that believes otherwise. While requests are held, hands tell at once what may set one
free, and otherwise with what they have to say next, since waking the core costs more than most news (`link.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from gateway.hand_link import HandLink
from gateway.messages import To
from gateway.scheduler import Scheduler

WITHIN_S = 0.005  # how late a hand may learn that a replica began or ended a prefill


class News:
    """`hands` is whoever is told, as it stands then."""

    def __init__(self, scheduler: Scheduler, hands: Collection[HandLink]) -> None:
        self._scheduler = scheduler
        self._hands = hands
        self._stirred: set[str] = set()
        self._pressed = False
        self._timer: asyncio.TimerHandle | None = None

    def touched(self, replica_id: str) -> None:
        """Something happened there that may begin or end a prefill, or set a held request free."""
        self._stirred.add(replica_id)
        self._soon()

    def pressed(self) -> None:
        """Looks whether requests are held: told now, and that none is any more with the rest."""
        if self._scheduler.held and not self._pressed:
            self._pressed = True
            for hand in self._hands:
                if hand.greeted:
                    hand.link.tell([To.PRESSED, True])
            self._soon()

    def greeted(self, hand: HandLink) -> None:
        """One that calls for the first time takes it that nothing is held."""
        if self._pressed:
            hand.link.tell([To.PRESSED, True])

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WITHIN_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        if self._pressed:
            if self._scheduler.held:
                self._soon()
            else:
                self._pressed = False
                for hand in self._hands:
                    if hand.greeted:
                        hand.link.mention([To.PRESSED, False])
        stirred, self._stirred = self._stirred, set()
        for replica_id in stirred:
            prefilling = self._scheduler.balancer.prefilling(replica_id)
            for hand in self._hands:
                if hand.prefilling.get(replica_id, False) != prefilling:
                    hand.prefilling[replica_id] = prefilling
                    hand.link.mention([To.PREFILL, replica_id, prefilling])
