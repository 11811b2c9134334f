"""The composition root: builds every object of one gateway process and wires them. Nothing else knows them all.

The proxied paths go straight to the raw ASGI `Proxy`; FastAPI has only the control plane's. `/health` is answered here,
before either, so that it stays quick whatever they do. Life: `start` on the running loop, `drain` when told to stop
(not ready, held requests refused, streams finish), `stop` at the end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.registry import CollectorRegistry

from gateway import asgi, live, prefixes
from gateway.access import Secrets
from gateway.admin import application
from gateway.client import Receive, Scope, Send
from gateway.config import Config, ConfigError
from gateway.control import Control, first, routing_policy
from gateway.discovery.membership import CONFIGURATION, Member, Membership
from gateway.discovery.sources import Sources
from gateway.experiment import Experiments, state_path
from gateway.fleet import Fleet
from gateway.gauges import Gauges, ReplicaGauges
from gateway.health import Phase
from gateway.journal import Journal
from gateway.lag import LoopLag
from gateway.metrics import Metrics
from gateway.prefixes import Prefixes
from gateway.proxy import Proxy
from gateway.recent import Recent
from gateway.record import RequestRecord
from gateway.replica import key_mistakes
from gateway.routes import CONTROL, health
from gateway.scheduler import Scheduler
from gateway.shadows import Shadows
from gateway.signals import Sign
from gateway.snapshot import snapshot
from gateway.tenants import Tenants
from gateway.trial import Trial
from gateway.version import own_version
from gateway.watch import Watch
from policies.core import Balancer
from policies.model import Ejected, FleetEvent, Returned, Scraped, Shed

if TYPE_CHECKING:
    from gateway.shared.sharing import Sharing

log = logging.getLogger("forebay")


class Gateway:
    """One gateway process as an ASGI application. Raises ConfigError or OSError when it cannot be built."""

    def __init__(
        self,
        config: Config,
        path: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] = os.environ,
        kind: type[Proxy] = Proxy,
    ) -> None:
        """`kind`: what serves the requests; the core of several processes has another than one process alone."""
        if mistakes := key_mistakes(config.replicas, environ):
            raise ConfigError(mistakes)
        tenants = Tenants.of(config, environ)
        rng = random.Random(config.policy.seed)
        self.shadows = Shadows(config.shadow)
        policy = self.shadows.wrap(routing_policy(config))
        self.balancer = Balancer(config.service_classes(), policy, config.arm().settings, rng)
        self.sharing: Sharing | None = None
        if config.redis.url is None:
            self.scheduler = Scheduler(self.balancer)
        else:
            from gateway.shared.sharing import share  # late: without Redis its client is not even imported

            self.sharing = share(config.redis, environ, self.balancer, lambda: self.proxy.tenants)
            self.scheduler = self.sharing.scheduler
        self.version, self.begun_at = own_version(), time.monotonic()
        self.metrics = Metrics(config.classes, self.version, self.gauges, config.tenants)
        self.recent = Recent()
        self.live = live.Live(lambda now: snapshot(self, now))
        self.fleet = Fleet(
            config.health,
            self._fleet_event,
            lambda replica_id: self.proxy.awaits(replica_id),
            silent=lambda replica_id, for_s: self.proxy.silent(replica_id, for_s),
        )
        self.journal = Journal(config.journal, environ) if config.journal.path else None
        self.proxy = kind(self.scheduler, self.fleet, config, self._finished, tenants, rng)
        self.prefixes = Prefixes(config.prefixes) if config.prefixes.enabled else None
        self.proxy.prefixes = self.prefixes
        self.proxy.consider = self.balancer.considered
        self.watch = Watch(self.fleet, config.health, config.scrape, rng)
        self.members = Membership(
            self.fleet,
            self._in_flight,
            self._membership_changed,
            slow_start_s=config.health.slow_start_s,
            environ=environ,
        )
        self.sources = Sources(self.members, environ, rng)
        self.lag = LoopLag(self.proxy.door.lagged)
        self.experiments = Experiments(self.scheduler, state_path(config), self._assign_by, self.shadows)
        self.experiments.overdue = lambda: self.proxy.late_requests(self.scheduler.clock())
        self.control = Control(
            proxy=self.proxy,
            scheduler=self.scheduler,
            fleet=self.fleet,
            watch=self.watch,
            members=self.members,
            sources=self.sources,
            metrics=self.metrics,
            experiments=self.experiments,
            shadows=self.shadows,
            path=path,
            overrides=overrides or {},
            versions=[first(config, "start")],
            environ=environ,
        )
        registry = CollectorRegistry()
        for own in (self.metrics, self.shadows, self.experiments):
            registry.register(own)
        if self.prefixes is not None:
            registry.register(self.prefixes)
        if self.sharing is not None:
            registry.register(self.sharing)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        secrets = Secrets.of(config.admin, config.metrics, environ)
        self.secrets = secrets
        self.registry = registry
        self._turn = asyncio.Lock()
        self.admin = application(self.control, registry, self.gauges, secrets, self.version)
        prefixes.mount(self.admin, self.prefixes)
        live.mount(self.admin, self.live)

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.scheduler.start()
        self.lag.start()
        config = self.control.config
        self.members.told(CONFIGURATION, [Member(table) for table in config.replicas])
        self.sources.configure(config.discovery)
        self.watch.sync()
        if self.sharing is not None:
            self.sharing.start(self.control)
        self.experiments.begin(self.control.config)

    def drain(self) -> None:
        """Not ready any more; who is held is told to go elsewhere; what runs may finish."""
        if not self.proxy.draining:
            self.proxy.draining = True
            for exchange in self.proxy.held():
                exchange.on_decision(Shed(exchange.record.request_id, "draining", 1.0))

    @property
    def config(self) -> Config:
        return self.control.config

    def reload(self) -> None:
        """Raises ConfigError."""
        self.control.reload("SIGHUP")

    def cut(self) -> None:
        """Ends what is still open."""
        self.proxy.cut()
        self.live.close()

    @property
    def open_requests(self) -> int:
        return self.proxy.open

    async def stop(self) -> None:
        if self.sharing is not None:
            await self.sharing.close()
        self.live.close()
        await self.sources.close()
        await self.watch.close()
        await self.experiments.end()
        self.lag.stop()
        if self.prefixes is not None:
            self.prefixes.stop()
        self.scheduler.stop()
        self.proxy.close()
        if self.journal is not None:
            self.journal.close()

    # -- ASGI ------------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path == "/health":
                await health(send)
            elif path.startswith(CONTROL):
                async with self._turn:  # one a turn of the loop: a thousand at once must not hold up the streams
                    await asyncio.sleep(0)
                await self.admin(scope, receive, send)
            else:
                await asgi.serve(self.proxy, scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close"})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    # -- wires -----------------------------------------------------------------------------------------------------

    def _fleet_event(self, event: FleetEvent) -> None:
        self.metrics.event(event)
        self.scheduler.fleet_event(event)
        if not isinstance(event, Scraped):
            self.live.changed()
        if isinstance(event, Ejected) and event.reason != Phase.STARTING.value:
            log.warning("replica %s: out of rotation: %s", event.replica_id, event.reason)
            if event.reason == Sign.HUNG.value:
                self.proxy.give_up_on(event.replica_id)
        elif isinstance(event, Returned):
            log.info("replica %s: %s", event.replica_id, "on trial" if event.half_open else "in rotation")

    def _in_flight(self, replica_id: str) -> int:
        state = self.balancer.fleet.replicas.get(replica_id)
        return 0 if state is None else state.ledger.in_flight

    def _membership_changed(self) -> None:
        self.proxy.prune()
        self.watch.sync()

    def _finished(self, record: RequestRecord) -> None:
        record.policy = self.experiments.policy_of(record.arm)
        if record.assignment is not None:
            self.experiments.finished(record, record.assignment)
        self.metrics.record(record)
        self.recent.add(record)
        if self.prefixes is not None and record.cacheable_tokens is not None:
            self.prefixes.finished(record)
        if self.journal is not None:
            self.journal.write(record)

    def _assign_by(self, trial: Trial | None) -> None:
        self.proxy.experiment = trial
        self.proxy.policy_changed()

    def gauges(self) -> Gauges:
        """Everything that /metrics reads at scrape time."""
        now = time.monotonic()
        held = self.proxy.held()
        core = self.balancer.snapshot()
        replicas = {}
        for replica_id in self.fleet.replicas:
            record = self.fleet.health.records[replica_id]
            known = core["replicas"].get(replica_id, {})
            state = self.balancer.fleet.replicas.get(replica_id)
            scraped = None if state is None else state.scraped
            replicas[replica_id] = ReplicaGauges(
                in_flight=known.get("in_flight", 0),
                prefill_backlog_tokens=known.get("backlog_tokens", 0.0),
                kv_headroom_tokens=known.get("kv_free_tokens"),
                available=self.fleet.available(replica_id),
                phase=record.phase.value,
                pacing_rate=known.get("pace_rate"),
                prefill_rate=known.get("prefill_rate"),
                running=None if scraped is None else scraped.running,
                waiting=None if scraped is None else scraped.waiting,
                kv_usage=None if scraped is None else scraped.kv_usage,
                scrape_age_s=None if scraped is None else now - scraped.at,
            )
        return Gauges(
            replicas=replicas,
            held_by_class=core["held"],
            held_bytes=core["held_bytes"],
            oldest_wait_s=max((now - e.record.received_at for e in held), default=0.0),
            open_requests=self.open_requests,
            margins={(name, band): m for name, bands in core["margins"].items() for band, m in bands.items()},
            capacity_factor=core["capacity_factor"],
            prediction_error=core["prediction_error"],
            prediction_bias=core["prediction_bias"],
            working_set_tokens=core["working_set_tokens"],
            working_set_share=core["working_set_share"],
            working_set_enforced=core["working_set_enforced"],
            loop_lag_s=self.lag.mean_s,
            loop_lag_max_s=self.lag.worst_s(),
            overloaded=self.proxy.overloaded,
            receiving_bytes=self.proxy.door.receiving_bytes,
            door_refusals=self.proxy.door.refused,
            sources={
                name: (r.members, None if r.read_at is None else now - r.read_at, r.failures)
                for name, r in self.sources.reports.items()
            },
            journal_written=self.journal.written if self.journal else 0,
            journal_dropped=self.journal.dropped if self.journal else 0,
            config_refused=self.control.refusals,
            config_version=self.control.versions[-1].number,
            draining=self.proxy.draining,
        )
