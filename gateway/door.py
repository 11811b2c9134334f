"""Whether the gateway itself can take one more request: its event loop keeps up, and bodies on their way in fit.

A loop that runs late makes every stream late, whatever the replicas could do, so past a bound on its smoothed lag new
requests of sheddable classes are refused before they cost anything (their prompt is not even hashed); the door opens
again below half of the bound, so that it does not flutter. Bodies that come in more than one read are counted while
they come, by bytes that are here and not by what a header promises: a promise costs no memory.
Trade-off: a refusal costs a read and a parse; a loop that only refuses is bounded by that.
"""

from __future__ import annotations

import math

from gateway.errors import OVERLOADED, Code, GatewayError
from gateway.lag import INTERVAL_S, MEMORY
from gateway.sections import Limits

REOPENS = 0.5  # of the bound
DECAY_S = INTERVAL_S / MEMORY  # time constant of the smoothed lag


class Door:
    """One per gateway. `lagged` is told the smoothed lag of the loop about ten times a second."""

    def __init__(self, limits: Limits) -> None:
        self.lag_s = 0.0
        self.shedding = False
        self.receiving_bytes = 0
        self.refused = {"loop_lag": 0, "receiving": 0, "sockets": 0}
        self.configure(limits)

    def configure(self, limits: Limits) -> None:
        self._bound_s, self._most_bytes = limits.loop_lag_s, limits.receiving_bytes
        self.lagged(self.lag_s)

    def lagged(self, mean_s: float) -> None:
        self.lag_s = mean_s
        bound = self._bound_s
        self.shedding = bound is not None and mean_s > (bound * REOPENS if self.shedding else bound)

    def late(self) -> GatewayError:
        """The refusal while `shedding`. Retry-After: when the lag will be at half the bound if it falls from now on."""
        self.refused["loop_lag"] += 1
        opens_at = REOPENS * (self._bound_s or self.lag_s)
        wait_s = DECAY_S * math.log(max(1.0, self.lag_s / opens_at)) if opens_at > 0.0 else 0.0
        return GatewayError(Code.QUEUE_FULL, OVERLOADED, max(1.0, wait_s))

    def receipt(self) -> Receipt:
        """For one body that did not come whole."""
        return Receipt(self)

    def fits(self, more: int) -> bool:
        """Whether so many bytes of a body may come."""
        return self.receiving_bytes + more <= self._most_bytes

    def _grown(self, more: int) -> GatewayError | None:
        self.receiving_bytes += more
        if self.receiving_bytes <= self._most_bytes:
            return None
        self.refused["receiving"] += 1
        return GatewayError(Code.QUEUE_FULL, "the gateway is receiving as many request bodies as it has room for", 1.0)


class Receipt:
    """The bytes of one body that are here while the rest is on its way. `close` it, whatever became of it."""

    __slots__ = ("_door", "_size")

    def __init__(self, door: Door) -> None:
        self._door = door
        self._size = 0

    def grown(self, size: int) -> GatewayError | None:
        """The body has this many bytes now; answers why there is no room for them."""
        more, self._size = size - self._size, size
        return self._door._grown(more)

    def close(self) -> None:
        self._door.receiving_bytes -= self._size
        self._size = 0
