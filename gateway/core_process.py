"""The core of several workers: everything of a gateway but its clients. The hands call it over a Unix socket.

It is a `Gateway` whose requests come from a `Hub`: the same queue, ledgers, watch, metrics, journal and control plane
as in one process, so there is one truth about the fleet however many processes carry bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from gateway import collecting, hands, mirror
from gateway.app import Gateway
from gateway.config import Config, ConfigError, build
from gateway.fleet import OPERATOR
from gateway.hub import Hub
from gateway.patience import Patience
from gateway.relayed import Asked
from policies.learnt import recall
from policies.model import Added, FleetEvent, PeerLoad, Scraped

SETTLE_S = 3.0  # for sources of replicas that have not answered
# for a hand that knows the core before: on a host short of CPU it may take long to call. Below `hand.FIRST_WELCOME_S`,
# after which a hand that is new takes clients whether it knows a fleet or not
RECALL_S = 8.0
log = logging.getLogger("forebay.core")


class Core(Gateway):
    """`again`: another core was there before, and the hands know what it had."""

    proxy: Hub

    def __init__(
        self,
        config: Config,
        path: Path | None,
        overrides: Mapping[str, Any],
        environ: Mapping[str, str] = os.environ,
        again: bool = False,
    ) -> None:
        super().__init__(config, path, overrides, environ, kind=Hub)
        self.proxy.ask = Asked(self.admin)
        self._again = again
        self.registry.register(hands.HandSeries(self.proxy))
        hands.mount(self.admin, self.proxy)
        self.lag.told = self.proxy.lagged

    def _fleet_event(self, event: FleetEvent) -> None:
        if isinstance(event, Added):  # what is held goes there at once: hands must know its address before
            self.proxy.show_fleet()
        super()._fleet_event(event)
        if not isinstance(event, Scraped | PeerLoad):
            self.proxy.fleet_changed()

    def _membership_changed(self) -> None:
        super()._membership_changed()
        self.proxy.fleet_changed()  # a replica that moves to another address is no event

    async def settle(self, leave: asyncio.Event) -> None:
        """Until it is known which replicas there are, within bounds, or until it has to leave; then hands are let in.

        A core that was restarted takes over what the first hands that called know of the one before: the running
        configuration, and replicas as they were seen last, until the first probes say more.
        """
        await _until(lambda: leave.is_set() or not self.fleet.awaited, SETTLE_S)
        if self._again:
            await _until(lambda: leave.is_set() or self._recalled(), RECALL_S)
        if leave.is_set():
            return
        if self._again and self.proxy.before is not None:
            try:
                self._take_over(*self.proxy.before)
            except ConfigError:
                log.exception("what the core before had cannot be taken over")
        self.proxy.welcome()

    def _recalled(self) -> bool:
        """A hand has said what it knows, or all have called and are as new as this core."""
        greeted = sum([hand.greeted for hand in self.proxy.hands], 0)
        return self.proxy.before is not None or greeted >= self.config.workers.count

    def _take_over(
        self, number: int, document: Mapping[str, Any], seen: mirror.View, known: Mapping[str, Any] | None
    ) -> None:
        config = build(document)
        if config != self.config:
            self.control.apply(config, "as it ran before the core was restarted")
        rows, _, _ = seen
        for name, _, _, _, models, learnt, drained_by, available in rows:
            if self.fleet.get(name) is None or not learnt:
                continue
            self.fleet.learn(name, [row[3] or {"id": row[0], "parent": row[1]} for row in models])
            if OPERATOR in drained_by:
                self.fleet.drain(name)
            if available or drained_by:
                self.fleet.probed(name, None)
        if known is not None:
            recall(self.balancer.dispatcher, known)
        log.info("took over %d replicas and configuration %d from the hands", len(rows), number)


async def run(core: Core, path: str, beat: Callable[[], None], leave: asyncio.Event) -> None:
    """Until SIGTERM, or `leave`: the supervisor is gone and no hand is left."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, leave.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # the supervisor tells when
    loop.add_signal_handler(signal.SIGHUP, lambda: _reload(core))
    await core.start()
    core.proxy.server = await loop.create_unix_server(lambda: cast(asyncio.Protocol, core.proxy.accept()), path)
    beat()
    await core.settle(leave)
    collecting.settle()
    await leave.wait()
    await core.stop()


async def _until(condition: Callable[[], bool], within_s: float) -> None:
    """Or until it has taken too long, which time does not count for that this process stood still."""
    with contextlib.suppress(TimeoutError):
        async with Patience(within_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def _reload(core: Core) -> None:
    try:
        core.reload()
    except ConfigError as e:
        for line in e.lines:
            log.error("reload refused: %s", line)
