"""Whether a replica has room now: for anything at all, for a request's KV, and beside those it must not harm.

A replica has room when it is out of pacing debt and has at most `backlog_s` of prefill left to do (less while it starts
slowly); an idle one always has. KV is a cliff, so it is asked for each request apart (`kv.py`). Work that only fills
goes where nobody else waits and the streams keep much of their slack, or when its lane is below its floor; a tenant
above its fair share gets what the others leave. Trade-off: four yes-or-no rules instead of one price.
"""

from __future__ import annotations

from typing import Final

from policies.fleet_state import Replica
from policies.queue import HeldQueue
from policies.settings import Settings
from policies.tracked import Tracked

FILL_STARTS: Final = 0.45  # least TPOT slack, as a share of the objective, beside work that only fills
FILL_STOPS: Final = 0.3
FILL_BACKLOG: Final = 0.5  # share of the backlog beside which work that only fills may start
FLOOD_BACKLOG: Final = 0.2  # share of the backlog beside which a tenant above its fair share may add its work
FLOOD_SLACK: Final = 0.25  # least TPOT slack for that, as a share of the objective


class Room:
    """Asked of one replica at a time; changes nothing."""

    def __init__(self, queue: HeldQueue, settings: Settings) -> None:
        self.queue = queue
        self.settings = settings

    def has(self, replica: Replica, now: float) -> bool:
        """Room for anything at all; the KV of one request is checked apart."""
        if replica.down or now < replica.closed_until:
            return False
        settings = self.settings
        if settings.pacing and replica.streams(now) and replica.pace.wait(now) > 0.0:
            return False
        if not settings.admission or (replica.peers is None and not replica.ledger.pending):
            return True
        return replica.ahead_s(now) <= settings.backlog_s * replica.ramp(now)

    def ready_at(self, replica: Replica, now: float) -> float:
        """When `has` may be true if nothing happens before; `now` where it may be already."""
        settings, ready = self.settings, max(now, replica.closed_until)
        if settings.pacing and replica.streams(now):
            ready = max(ready, now + replica.pace.wait(now))
        if settings.admission:
            ready = max(ready, now + replica.ahead_s(now) - settings.backlog_s * replica.ramp(now))
        return ready

    def fits(self, tracked: Tracked, replica: Replica, output_tokens: float, now: float) -> bool:
        """Whether the KV of this request fits, of which the views say what is cached."""
        need = replica.view.uncached_tokens + output_tokens
        fill = tracked.service_class.fill_only
        return replica.kv.fits(need, replica.ledger.kv_tokens, now, self.settings, batch=fill)

    def spare(self, replica: Replica, tracked: Tracked, now: float) -> bool:
        """Room for work that only fills: nobody else waits for it, or its lane is below its floor."""
        if now < tracked.not_before:
            return False
        lane = self.queue.lane(tracked.request.model, tracked.service_class)
        if self.queue.starves(lane, now):
            return True
        if replica.awaited:
            return False
        ledger, settings = replica.ledger, self.settings
        if ledger.pending and ledger.backlog_s(now) > FILL_BACKLOG * settings.backlog_s:
            return False
        return not settings.pacing or not ledger.live_decodes or replica.pace.spare(FILL_STARTS)

    def left_over(self, replica: Replica, now: float) -> bool:
        """Room for a tenant above its fair share while others are within theirs: what those leave. Their next request
        must find the engine nearly free and the streams with slack, so a flood neither queues there nor runs long."""
        ledger = replica.ledger
        if ledger.pending and ledger.backlog_s(now) > FLOOD_BACKLOG * self.settings.backlog_s:
            return False
        return not ledger.live_decodes or replica.pace.spare(FLOOD_SLACK)

    def must_clear(self, replica: Replica) -> bool:
        """Whether the streams there have lost the slack that work which only fills leaves them."""
        return not replica.pace.spare(FILL_STOPS)
