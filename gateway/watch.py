"""Keeps an eye on each replica: two small loops per replica, one that probes and one that scrapes.

The first probe is sent at once, so that a fleet is in rotation as soon as it answers. Models are read when the first
probe is good, again after a restart, and every `models_refresh_s` (adapters come and go). A failure is logged when it
begins and when it ends, not once a second. Trade-off: 2 N requests in each interval and N tasks, for fleets of up to
a few hundred replicas per gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

from gateway import probe, scrape
from gateway.fetch import Fetcher
from gateway.fleet import Fleet
from gateway.lost_cancel import told_to_end
from gateway.replica import Replica
from gateway.sections import Health, Scrape

AT_ONCE, APART_S = 32, 0.003  # a thousand that begin in one turn of the loop would hold up every stream for a second
log = logging.getLogger("forebay.fleet")


class Watch:
    """Owner of the loops and of the connections they use. `sync` starts and stops them to match the fleet."""

    def __init__(
        self,
        fleet: Fleet,
        health: Health,
        scraping: Scrape,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._health = health
        self._scraping = scraping
        self._rng = rng
        self._clock = clock
        self._tasks: dict[str, tuple[Replica, asyncio.Task[None]]] = {}
        self._probed: set[str] = set()
        self.settled = asyncio.Event()  # every replica has answered, or failed, its first probe
        self._troubles: dict[tuple[str, str], str] = {}
        self._models_read_at: dict[str, float] = {}
        self._turn = asyncio.Lock()  # of those that begin one after the other

    def sync(self) -> None:
        """Call after replicas were added, removed or replaced."""
        for replica_id, (watched, task) in list(self._tasks.items()):
            if self._fleet.get(replica_id) is not watched:
                del self._tasks[replica_id]
                self._models_read_at.pop(replica_id, None)
                self._probed.discard(replica_id)
                for key in [k for k in self._troubles if k[0] == replica_id]:
                    del self._troubles[key]
                task.cancel()
        begun = 0
        for replica in self._fleet.replicas.values():
            if replica.id not in self._tasks:
                task = asyncio.create_task(self._watch(replica, begun >= AT_ONCE), name=f"watch {replica.id}")
                task.add_done_callback(_report)
                self._tasks[replica.id] = (replica, task)
                begun += 1

    def configure(self, health: Health, scraping: Scrape) -> None:
        """New intervals, and whatever changed in the fleet."""
        self._health, self._scraping = health, scraping
        self.sync()

    async def close(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, replica: Replica, in_turn: bool) -> None:
        if in_turn:
            async with self._turn:
                await asyncio.sleep(APART_S)
        look = asyncio.Event()  # a scrape failed after one that did not: the next probe is due now
        with contextlib.closing(Fetcher(replica)) as asked:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._probe_loop(replica, asked, look))
                loops.create_task(self._scrape_loop(replica, asked, look))

    async def _probe_loop(self, replica: Replica, asked: Fetcher, look: asyncio.Event) -> None:
        while not told_to_end():
            s = self._health
            failure = await probe.health(asked, s.probe_timeout_s)
            if failure is None and self._there(replica) and self._models_due(replica):
                await self._learn(replica, asked)
            if not self._there(replica):
                return
            self._said(replica, "/health", None if failure is None else failure.value)
            self._fleet.probed(replica.id, failure)
            self._fleet.wake()
            self._probed.add(replica.id)
            if self._probed >= self._tasks.keys():
                self.settled.set()
            if self._fleet.health.wants_canary(replica.id, self._clock()):
                failure = await probe.token(asked, replica, s.canary_timeout_s)
                if self._there(replica):
                    self._fleet.canaried(replica.id, failure)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s(s.probe_interval_s)):
                    await look.wait()
            look.clear()

    async def _scrape_loop(self, replica: Replica, asked: Fetcher, look: asyncio.Event) -> None:
        while not told_to_end():
            s = self._scraping
            url = replica.url
            try:
                values, trouble = await scrape.metrics(asked, replica.id, s.timeout_s, self._clock), None
            except scrape.ReadError as e:
                values, trouble = None, str(e)
            if not self._there(replica):
                return
            if trouble is not None and (replica.id, "/metrics") not in self._troubles:
                look.set()
            self._said(replica, "/metrics", trouble)
            moved = url != replica.url  # then these are the words of whoever is at the old address
            if values is not None and not moved and self._fleet.scraped(values):
                log.warning("replica %s: is a new process since the last scrape; its cache is empty", replica.id)
                self._models_read_at.pop(replica.id, None)
            await asyncio.sleep(self._interval_s(s.interval_s))

    async def _learn(self, replica: Replica, asked: Fetcher) -> None:
        try:
            rows, trouble = await scrape.models(asked, self._scraping.timeout_s), None
        except scrape.ReadError as e:
            rows, trouble = None, str(e)
        if not self._there(replica):
            return
        self._said(replica, "/v1/models", trouble)
        if rows is None:
            return
        self._models_read_at[replica.id] = self._clock()
        self._fleet.learn(replica.id, rows)

    def _there(self, replica: Replica) -> bool:
        """Whether it is still in the fleet; another may have its name by now."""
        return self._fleet.get(replica.id) is replica

    def _models_due(self, replica: Replica) -> bool:
        read_at = self._models_read_at.get(replica.id)
        return read_at is None or self._clock() - read_at >= self._scraping.models_refresh_s

    def _interval_s(self, interval_s: float) -> float:
        return interval_s * (1.0 + self._scraping.jitter_share * (2.0 * self._rng.random() - 1.0))

    def _said(self, replica: Replica, what: str, trouble: str | None) -> None:
        """Logs a trouble when it begins, changes or ends."""
        key = (replica.id, what)
        before = self._troubles.get(key)
        if trouble is None:
            if self._troubles.pop(key, None) is not None:
                log.info("replica %s: %s answers again", replica.id, what)
        elif trouble != before:
            self._troubles[key] = trouble
            log.warning("replica %s: %s", replica.id, trouble if trouble.startswith("/") else f"{what}: {trouble}")


def _report(task: asyncio.Task[None]) -> None:
    """A watch that fails is our own fault; it must not fail in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s stopped", task.get_name(), exc_info=error)
