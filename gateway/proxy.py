"""The proxied endpoints as one raw ASGI application, and what all their requests share.

Shared: connection pools by replica, the retry budget, bytes per token by model, which replica made which response id,
and the sweep over open requests for their deadlines. FastAPI never sees these paths: its routing alone costs more than
a whole request here.
"""

from __future__ import annotations

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from mypy_extensions import mypyc_attr

from gateway import endpoints, errors, retry
from gateway.admit import Admission
from gateway.client import Client, Scope
from gateway.config import Config
from gateway.door import Door
from gateway.endpoints import Kind
from gateway.errors import GatewayError
from gateway.exchange import Exchange
from gateway.fleet import Fleet
from gateway.placement import Placement
from gateway.prefixes import Prefixes
from gateway.record import RequestRecord
from gateway.relay import Mode, Relay
from gateway.replica import Replica
from gateway.request_head import RequestHead
from gateway.retry import Failure, RetryBudget
from gateway.stall import Stalls
from gateway.tenants import Tenant, Tenants
from gateway.trial import Trial, late
from gateway.upstream import Pool
from policies.designs import Assignment
from policies.feedback import BytesPerToken
from policies.model import Alternative, Request, ServiceClass, Shed

SWEEP_S = 0.25
CONSIDER_S = 0.2  # between two refusals whose alternatives are looked up, so that an overload costs nothing more
MOST_RESPONSES = 10_000  # response ids remembered
log = logging.getLogger("forebay.proxy")


class Rules:
    """What every request asks of the configuration, as plain values: reading pydantic costs ten times as much."""

    __slots__ = ("asks_usage", "default_class", "journals", "most_body_bytes", "policy", "samples")

    def __init__(self, config: Config) -> None:
        self.most_body_bytes = config.limits.max_body_bytes
        self.asks_usage = config.stream.usage == "ask"
        self.default_class = config.default_class
        self.policy = config.policy.name
        self.journals = bool(config.journal.path)
        self.samples = config.journal.prompt_samples


@mypyc_attr(allow_interpreted_subclasses=True)
class Proxy:
    """`sink` receives each finished record. `configure` takes a new configuration; open requests keep theirs."""

    def __init__(
        self,
        scheduler: Placement,
        fleet: Fleet,
        config: Config,
        sink: Callable[[RequestRecord], None],
        tenants: Tenants | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.fleet = fleet
        self.sink = sink
        self.rng = rng or random.Random()
        self.door = Door(config.limits)
        self.stalls = Stalls()
        self.prefixes: Prefixes | None = None  # who wants to see admitted requests
        self.budget = RetryBudget(config.retry.budget_share, config.retry.budget_per_s)
        self.bytes_per_token = BytesPerToken()
        self.live: set[Exchange] = set()
        self._pools: dict[str, Pool] = {}
        self._pooled: dict[str, Replica] = {}  # whose connections they are
        self._makers: OrderedDict[str, str] = OrderedDict()
        self._swept_at = 0.0
        self._consider_at = 0.0
        self.consider: Callable[[Request, float], tuple[Alternative, ...]] | None = (
            None  # what a refused one could have
        )
        self.draining = False
        self.experiment: Trial | None = None  # assigns requests while one runs
        self.leaving = False  # connections end with the answers they wait for
        self.configure(config, tenants if tenants is not None else Tenants.of(config))
        scheduler.on_tick = self.on_tick

    def configure(self, config: Config, tenants: Tenants) -> None:
        self.config, self.rules = config, Rules(config)
        self.door.configure(config.limits)
        self.tenants = tenants
        self.trusted = frozenset(config.listen.trusted_proxies)
        self._classes = config.service_classes()
        self.budget.share, self.budget.per_s = config.retry.budget_share, config.retry.budget_per_s

    def policy_changed(self) -> None:
        """Another policy acts: it may read prompts where the one before did not. Here nobody keeps that."""

    def begin(self, scope: Scope, client: Client, head: RequestHead | None) -> bool:
        """`wire.Proxied`: a whole request for an endpoint of the table is served without a task."""
        endpoint = endpoints.ALLOW.get(scope["path"])
        if endpoint is None or self.draining or scope["method"] != "POST":
            return False
        Exchange(self, scope, client, endpoint, head).begin()
        return True

    # -- what exchanges ask --------------------------------------------------------------------------------------

    def authenticate(self, given: Mapping[bytes, bytes]) -> Tenant | None:
        if not self.tenants.configured:
            return None
        authorization, key = given.get(b"authorization"), given.get(b"x-api-key")
        return self.tenants.authenticate(
            None if authorization is None else authorization.decode("latin-1"),
            None if key is None else key.decode("latin-1"),
        )

    def refusal(self, admission: Admission, shed: Shed, record: RequestRecord) -> GatewayError:
        """A request that the core refused."""
        if admission.candidates is None:
            record.alternatives = self.considered(admission.request)
        request = admission.request
        bounds = {"first token": request.ttft_deadline, "end": request.deadline}
        objectives_s = {what: at - request.received_at for what, at in bounds.items() if at is not None}
        return errors.shed(shed.reason, shed.retry_after_s, objectives_s, shed.predicted_ttft_s, shed.said)

    def considered(self, request: Request) -> tuple[Alternative, ...]:
        """What a request that was refused just now could have had; looked up for some of them only."""
        now = time.monotonic()
        if self.consider is None or now < self._consider_at:
            return ()
        self._consider_at = now + CONSIDER_S
        return self.consider(request, now)

    def service_class(self, name: str) -> ServiceClass:
        return self._classes[name]

    def pool(self, replica_id: str) -> Pool | None:
        """The connections to a replica, or None where it is not (or no longer) there."""
        replica = self.fleet.get(replica_id)
        pool = self._pools.get(replica_id)
        if replica is None:
            self.prune()
            return None
        if pool is None or pool.url != replica.url:
            self.prune()
            times = self.config.timeouts
            self._pooled[replica_id] = replica
            pool = self._pools[replica_id] = Pool(
                replica.url,
                connect_timeout_s=times.connect_s,
                idle_s=times.pool_idle_s,
                ca_file=replica.ca_file,
                key=replica.key,
            )
        return pool

    def prune(self) -> None:
        """Lets go of the connections to replicas that are gone, moved or replaced; those in use end by themselves."""
        for replica_id, pool in list(self._pools.items()):
            replica = self.fleet.get(replica_id)
            if replica is None or replica is not self._pooled[replica_id] or replica.url != pool.url:
                self._pools.pop(replica_id).close()
                del self._pooled[replica_id]

    def available(self, model: str) -> list[str]:
        """Ids of available replicas that serve the model; an empty name means any."""
        replicas = self.fleet.serving(model) if model else self.fleet.replicas.values()
        return [replica.id for replica in replicas if self.fleet.available(replica.id)]

    def default_model(self) -> str:
        """What a request without a model means: the first model of the first replica that has any."""
        for replica in self.fleet.replicas.values():
            for model in replica.models.values():
                if model.parent is None:
                    return model.id
        return ""

    def made(self, response_id: str, replica_id: str) -> None:
        """Remembers where the state of a response lives."""
        self._makers[response_id] = replica_id
        while len(self._makers) > MOST_RESPONSES:
            self._makers.popitem(last=False)

    def maker(self, response_id: str) -> str | None:
        return self._makers.get(response_id)

    def overdue(self, relay: Relay, admission: Admission, paused: bool, now: float) -> Failure | None:
        """Which of its time limits an attempt has passed. A client that does not read is not the replica's fault."""
        deadline = admission.request.deadline
        if deadline is not None and now >= deadline:
            return retry.EXPIRED
        if paused:
            return None
        times = self.config.timeouts
        silent_s = now - relay.last_sign_at
        if admission.call.streams and admission.endpoint.kind is Kind.GENERATE:
            if relay.last_sign_at == relay.dispatched_at:
                return retry.FIRST_EVENT_TIMEOUT if silent_s > times.first_event_s else None
        elif relay.mode is Mode.HEAD:
            return retry.FIRST_EVENT_TIMEOUT if times.answer_s is not None and silent_s > times.answer_s else None
        return retry.IDLE_TIMEOUT if silent_s > times.idle_s else None

    @property
    def open(self) -> int:
        """Requests received and not finished."""
        return len(self.live)

    @property
    def overloaded(self) -> bool:
        """Whether requests are refused because the gateway itself cannot keep up."""
        return self.door.shedding

    def held(self) -> list[Exchange]:
        """Open requests that wait for a decision."""
        return [exchange for exchange in self.live if exchange.held]

    def late_requests(self, now: float) -> Iterator[tuple[Assignment, float]]:
        """Of an experiment, whose first token is overdue: where they stand in it, and how old they are in seconds."""
        for exchange in self.live:
            given, admission = exchange.record.assignment, exchange.admission
            if given is None or admission is None or exchange.record.first_content_at is not None:
                continue
            if late(admission.request, now):
                yield given, now - admission.request.received_at

    def awaits(self, replica_id: str) -> int:
        """Requests that only this replica's engine can move on. One whose client does not read is not: the engine may
        have long finished it, and would look hung to everyone because of one slow reader."""
        waits = [
            exchange.relay is not None
            and not exchange.relay.over
            and exchange.record.replica_id == replica_id
            and exchange.endpoint.takes_steps
            and not exchange.client.paused
            for exchange in self.live
        ]
        return waits.count(True)

    def silent(self, replica_id: str, for_s: float) -> int:
        """Streams of a replica that have begun and said nothing for so long, though their clients read."""
        now = time.monotonic()
        quiet = [
            (relay := exchange.relay) is not None
            and not relay.over
            and relay.content_events > 0
            and exchange.record.replica_id == replica_id
            and not exchange.client.paused
            and now - relay.last_sign_at >= for_s
            for exchange in self.live
        ]
        return quiet.count(True)

    def give_up_on(self, replica_id: str, silent_since: float = 0.0) -> None:
        """The engine hangs or its port is shut: what has no content yet is tried elsewhere, not at its timeout.

        Answers that have begun end if they have said nothing since then.
        """
        for exchange in list(self.live):
            relay = exchange.relay
            if relay is None or exchange.record.replica_id != replica_id:
                continue
            if not relay.content_events:
                relay.fail(retry.FIRST_EVENT_TIMEOUT)
            elif relay.last_sign_at < silent_since and not exchange.client.paused:
                relay.fail(retry.IDLE_TIMEOUT)

    def cut(self) -> None:
        """Ends what is still open: a status before the answer has begun, an error event after."""
        for exchange in list(self.live):
            if exchange.relay is not None:
                exchange.relay.fail(retry.DRAINING)

    # -- life ----------------------------------------------------------------------------------------------------

    def on_tick(self, now: float) -> bool:
        if now - self._swept_at >= SWEEP_S:
            self._swept_at = now
            for exchange in self.stalls.look(self.live, now, self.config.timeouts.client_stall_s):
                exchange.record.reason = "client_stalled"
                exchange.client.abandon()
            for replica_id in self.fleet.health.shut(now):
                self.give_up_on(replica_id, now - self.config.health.hang_s)
            for exchange in list(self.live):
                exchange.on_tick(now)
        return bool(self.live)

    def finished(self, record: RequestRecord) -> None:
        try:
            self.sink(record)
        except Exception:
            log.exception("the record of request %s was lost", record.request_id)

    def close(self) -> None:
        """Closes idle upstream connections."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self._pooled.clear()
