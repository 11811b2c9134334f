"""The core of several workers: everything of a gateway but its clients. The hands call it over a Unix socket.

It is a `Gateway` whose requests come from a `Hub`: the same queue, ledgers, watch, metrics, journal and control plane
as in one process, so there is one truth about the fleet however many processes carry bytes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gateway import mirror
from gateway.app import Gateway
from gateway.config import Config, ConfigError, build
from gateway.hands import HandSeries
from gateway.hub import Hub
from gateway.relayed import Asked
from policies.model import FleetEvent, PeerLoad, Scraped

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
        if again:
            self.proxy.seed = self._take_over
        self.registry.register(HandSeries(self.proxy))
        self.lag.told = self.proxy.lagged

    def _fleet_event(self, event: FleetEvent) -> None:
        super()._fleet_event(event)
        if not isinstance(event, Scraped | PeerLoad):
            self.proxy.fleet_changed()

    def _take_over(self, number: int, document: Mapping[str, Any], seen: mirror.View) -> None:
        """The running configuration, and replicas as they were seen last, until the first probes say more."""
        config = build(document)
        if config != self.config:
            self.control.apply(config, "as it ran before the core was restarted")
        rows, _ = seen
        for spelled, models, learnt, draining, available in rows:
            name = spelled["id"] or next((t.name for t in config.replicas if t.url == spelled["url"]), "")
            if self.fleet.get(name) is None or not learnt:
                continue
            self.fleet.learn(name, [row[3] or {"id": row[0], "parent": row[1]} for row in models])
            if draining:
                self.fleet.drain(name)
            if available or draining:
                self.fleet.probed(name, None)
        log.info("took over %d replicas and configuration %d from the hands", len(rows), number)


async def run(core: Core, path: str, beat: Callable[[], None], leave: asyncio.Event) -> None:
    """Until SIGTERM, or `leave`: the supervisor is gone and no hand is left."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, leave.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # the supervisor tells when
    loop.add_signal_handler(signal.SIGHUP, lambda: _reload(core))
    await core.start()
    await core.proxy.listen(path)
    beat()
    gc.collect()
    gc.set_threshold(20_000, 20, 50)
    gc.freeze()
    await leave.wait()
    await core.stop()


def _reload(core: Core) -> None:
    try:
        core.reload()
    except ConfigError as e:
        for line in e.lines:
            log.error("reload refused: %s", line)
