"""Clients that take nothing: each holds a replica's stream still, and with it KV cache that others need.

A client counts as stalled once writing to it is paused and the bytes that wait for it have not become fewer for
`client_stall_s`. A slow one makes progress and is left alone. Looked at with the sweep, a few times a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.exchange import Exchange


class Stalls:
    def __init__(self) -> None:
        self._waiting: dict[Exchange, tuple[int, float]] = {}  # unsent bytes, and since when they stand

    def look(self, exchanges: Iterable[Exchange], now: float, limit_s: float | None) -> list[Exchange]:
        """Those whose client has taken nothing for `limit_s` seconds; None: no limit."""
        stalled: list[Exchange] = []
        waiting: dict[Exchange, tuple[int, float]] = {}
        for exchange in exchanges:
            if not exchange.client.paused:
                continue
            unsent = exchange.client.unsent
            before, since = self._waiting.get(exchange, (unsent + 1, now))
            if unsent < before:
                since = now
            waiting[exchange] = (unsent, since)
            if limit_s is not None and now - since >= limit_s:
                stalled.append(exchange)
        self._waiting = waiting
        return stalled
