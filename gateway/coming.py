"""A request whose head is known and whose body is still on its way: its reads, until they are all of it.

A body of more than a segment or two mostly comes in several reads, milliseconds apart. Collected here they cost no task
and no parser; together they are one known request again. What takes longer than `PATIENCE_S`, is larger than
`MOST_BYTES`, does not fit into the gateway's room for bodies, or turns out to be more than one request goes through the
parser as if nothing had been collected, with every limit and error that belongs there.
"""

from __future__ import annotations

import asyncio

from gateway.door import Door, Receipt
from gateway.request_head import RequestHead

MOST_BYTES = 1024 * 1024
PATIENCE_S = 0.25


class Coming:
    __slots__ = ("_door", "_receipt", "head", "known", "missing", "parts", "timer")

    def __init__(self, known: RequestHead, door: Door, data: bytes, at: int, missing: int) -> None:
        """`data`: the first read, with the body from `at` on; `missing`: bytes of it that are not here."""
        self.known = known
        self.head = data[:at]
        self.parts = [data[at:]]
        self.missing = missing
        self.timer: asyncio.TimerHandle | None = None
        self._door = door
        self._receipt: Receipt = door.receipt()
        self._receipt.grown(len(self.parts[0]))

    def add(self, data: bytes) -> bool:
        """One more read. False: it is not one for here."""
        size = len(data)
        self.parts.append(data)
        self.missing -= size
        if self.missing < 0 or not self._door.fits(size):
            return False
        self._receipt.grown(sum([len(part) for part in self.parts], 0))
        return True

    def close(self) -> None:
        self._receipt.close()
        if self.timer is not None:
            self.timer.cancel()
