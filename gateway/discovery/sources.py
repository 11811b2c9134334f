"""The sources that are switched on, each as a task that only tells; they follow the configuration.

A source that fails by a mistake of ours is logged and started again: the fleet must not freeze because of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from gateway.discovery.membership import Membership
from gateway.discovery.report import Report
from gateway.discovery.tables import Discovery
from gateway.lost_cancel import told_to_end

log = logging.getLogger("forebay.discovery")
AGAIN_S = 1.0


class Source(Protocol):
    async def run(self, report: Report) -> None: ...


class Sources:
    """Owner of the tasks. `reports` holds what each source last said."""

    def __init__(
        self, members: Membership, environ: Mapping[str, str] = os.environ, rng: random.Random | None = None
    ) -> None:
        self.reports: dict[str, Report] = {}
        self._members = members
        self._environ = environ
        self._rng = rng or random.Random()
        self._running: dict[str, tuple[Any, asyncio.Task[None]]] = {}

    def configure(self, settings: Discovery) -> None:
        """Starts, replaces and stops sources. The members of a stopped source leave the fleet."""
        self._members.drain_s = settings.drain_s
        wanted = dict(_configured(settings))
        for name in [n for n, (table, _) in self._running.items() if wanted.get(n) != table]:
            self._running.pop(name)[1].cancel()
            if name not in wanted:
                del self.reports[name]
                self._members.fleet.awaited.discard(name)
                self._members.told(name, ())
                del self._members.lists[name]
        for name, table in wanted.items():
            if name not in self._running:
                self._start(name, table)

    async def close(self) -> None:
        tasks = [task for _, task in self._running.values()]
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._members.close()

    def _start(self, name: str, table: Any) -> None:
        awaited = self._members.fleet.awaited
        if name not in self.reports:
            awaited.add(name)

        def take(members: Any, name: str = name) -> list[str]:
            if name not in self._running:
                return []  # told in the moment it was stopped
            return self._members.told(name, members)

        report = self.reports[name] = Report(name, take, lambda: awaited.discard(name))
        task = asyncio.create_task(self._run(name, table, report), name=f"discovery {name}")
        self._running[name] = (table, task)

    async def _run(self, name: str, table: Any, report: Report) -> None:
        while not told_to_end():
            try:
                await self._source(name, table).run(report)
            except Exception:
                log.exception("discovery from %s failed; it starts again", name)
                report.failed("failed by a mistake in the gateway, see its log")
            await asyncio.sleep(AGAIN_S)

    def _source(self, name: str, table: Any) -> Source:
        """Imported late: dnspython takes 60 ms, and most gateways need one source or none."""
        settings, key_env, ca_file = table
        if name == "file":
            from gateway.discovery.watched_file import WatchedFile

            return WatchedFile(settings.path, settings.poll_s)
        if name == "dns":
            from gateway.discovery.names import Names

            return Names(settings, key_env, ca_file)
        from gateway.discovery.kubernetes import Kubernetes

        return Kubernetes(settings, key_env, ca_file, self._environ, self._rng)


def _configured(settings: Discovery) -> Iterator[tuple[str, Any]]:
    if settings.file.path:
        yield "file", (settings.file, None, None)
    if settings.dns.names:
        yield "dns", (settings.dns, settings.key_env, settings.ca_file)
    if settings.kubernetes.selector:
        yield "kubernetes", (settings.kubernetes, settings.key_env, settings.ca_file)
