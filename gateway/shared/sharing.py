"""Everything a gateway shares: one exchange in the background carries all that is not asked for a request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.control import Control
from gateway.lost_cancel import told_to_end
from gateway.shared.bell import SOONEST_S, Bell
from gateway.shared.changes import Changes
from gateway.shared.clock import SharedClock
from gateway.shared.lookups import Lookups
from gateway.shared.prefix_index import PrefixIndex
from gateway.shared.registers import Registers
from gateway.shared.scheduler import SharedScheduler
from gateway.shared.store import Command, Store
from gateway.shared.table import RedisTable
from gateway.shared.trials import Trials
from gateway.tenants import Tenants
from policies.core import Balancer

MOST_WAIT_S = 1.0  # between two tries while Redis is away
log = logging.getLogger("forebay.shared")


class Sharing(Collector):
    """Owner of the store. `start` on the running loop once `control` is there; `close` at the end."""

    def __init__(self, table: RedisTable, environ: Mapping[str, str], scheduler: SharedScheduler) -> None:
        self.me = table.gateway_id or f"{socket.gethostname()[:40]}-{secrets.token_hex(4)}"
        self.store = Store(table, environ)
        self.scheduler = scheduler
        self.index = PrefixIndex(self.store, self._started_at, scheduler.clock, self._keeps_s)
        self.registers = Registers(self.store, self.me, scheduler)
        self.lookups = Lookups(self.store)
        self.changes = Changes(self.store, self.me)
        self.trials = Trials(self.store, scheduler.clock)
        self.clock = SharedClock()
        scheduler.store, scheduler.lookups = self.store, self.lookups
        scheduler.index, scheduler.registers = self.index, self.registers
        self.bell = Bell(self.store, self.me, lambda: self._soon.set())
        scheduler.sent_long = self._ring
        self._soon = asyncio.Event()  # exchange now and not at the next turn
        self._rings = False  # and let the others do so
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_at = scheduler.clock()
        self._epoch: object = None

    def start(self, control: Control) -> None:
        self.changes.control = control
        control.announce = self.changes.tell
        self.trials.experiments, self.trials.config = control.experiments, lambda: control.config
        control.experiments.others = self.trials
        start = asyncio.get_running_loop().create_task
        self._tasks = [
            start(self._exchange(), name="exchange with other gateways"),
            start(self.bell.listen(), name="rings of other gateways"),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2.0 * self.store.table.call_s)
        await self.lookups.close()
        await self.store.close()

    async def _exchange(self) -> None:
        failures = 0
        table = self.store.table
        while not told_to_end():
            try:
                failures = 0 if await self._once() else failures + 1
            except Exception:
                log.exception("an exchange with the other gateways failed")
                failures += 1
            if failures:
                await asyncio.sleep(min(MOST_WAIT_S, table.register_s * 2 ** min(failures, 10)))
                continue
            await asyncio.sleep(min(SOONEST_S, table.register_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, table.register_s - SOONEST_S)):
                    await self._soon.wait()
            self._soon.clear()

    def _ring(self) -> None:
        """A long prefill was sent."""
        self._rings = True
        self._soon.set()

    async def _once(self) -> bool:
        tenants = self.scheduler.tenants()
        assert isinstance(tenants, Tenants)
        trials, changes, due = self.trials.commands(), self.changes.commands(), self.scheduler.due
        self.scheduler.due = []
        epoch = self.store.key("epoch")  # a value that whoever finds none makes up: another one, and all is lost
        first: list[Command] = [
            self.registers.command(tenants),
            ("SETNX", epoch, secrets.token_hex(8)),
            ("GET", epoch),
            self.clock.command(),
        ]
        written = self.index.commands() if self.store.up else []
        rings, self._rings = [self.bell.ring()] if self._rings else [], False
        answers = await self.store.call("exchange", [*first, *trials, *changes, *written, *due, *rings], probe=True)
        registers, _, found = (None, None, None) if answers is None else answers[:3]
        if answers is not None and found != self._epoch:
            self._epoch = found
            self.index.forget_written()
        if isinstance(registers, list):
            self._heard_at = self.scheduler.clock()
            self.registers.heard(registers)
        elif self.scheduler.clock() - self._heard_at > self.store.table.expiry_s:
            self.registers.alone()
        if answers is not None:
            self.clock.heard(answers[3])
            self.trials.experiments.lead(self.clock.ahead_s)
            self.trials.heard(answers[4 : 4 + len(trials)])  # before changes, which may be what an end made possible
            self.changes.heard(answers[4 + len(trials) :][: len(changes)])
        return answers is not None

    def _started_at(self, replica_id: str) -> float | None:
        replica = self.scheduler.balancer.fleet.replicas.get(replica_id)
        return None if replica is None or replica.scraped is None else replica.scraped.started_at

    def _keeps_s(self, replica_id: str) -> float:
        replica = self.scheduler.balancer.fleet.replicas.get(replica_id)
        return math.inf if replica is None else replica.keeps_s

    def collect(self) -> Iterator[Metric]:
        up, peers = self.store.up, self.registers.peers
        yield GaugeMetricFamily("forebay_shared_up", "1 while Redis answers.", value=float(up))
        yield GaugeMetricFamily("forebay_shared_peers", "Other gateways that were heard of last.", value=len(peers))
        calls = CounterMetricFamily("forebay_shared_calls", "Calls of Redis by outcome.", labels=("call", "outcome"))
        for (call, outcome), count in self.store.calls.items():
            calls.add_metric([call, outcome], float(count))
        yield calls


def share(table: RedisTable, environ: Mapping[str, str], balancer: Balancer, tenants: Callable[[], Tenants]) -> Sharing:
    """With a scheduler that asks before the core decides."""
    scheduler = SharedScheduler(balancer)
    scheduler.tenants = tenants
    return Sharing(table, environ, scheduler)
