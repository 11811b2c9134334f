"""A hand: the process that carries the bytes of some of the host's clients and asks the core about each request.

It has a proxy like that of one process, a mirror of the fleet, and a scheduler that asks (`remote.py`). Whatever is
whole-host (readiness, metrics, administration, journal) is the core's and only passed on here. Limits that count per
process (retry budget, bodies on their way in, quotas while alone) are a hand's part of the configured ones.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

from gateway import asgi, live
from gateway.client import Receive, Scope, Send
from gateway.config import Config, build
from gateway.exchange import Exchange
from gateway.hand_live import Viewers
from gateway.lag import LoopLag
from gateway.link import Link
from gateway.lost_cancel import told_to_end
from gateway.messages import ABORT, DISPATCH, Message, To
from gateway.mirror import Mirror
from gateway.prefixes import MOST_BODY_BYTES
from gateway.proxy import Proxy
from gateway.relayed import Asking
from gateway.remote import RemoteScheduler
from gateway.routes import CONTROL, health
from gateway.signals import Sign
from gateway.tenants import Tenants
from policies.model import Shed

CALL_S = 0.05  # between two calls for a core
HUNG_S = 1.0  # before a core that hung is called again
STATE_S = 1.0
FIRST_WELCOME_S = 10.0  # a hand takes clients then even if it knows no fleet
log = logging.getLogger("forebay.hand")


class Hand:
    """One hand as an ASGI application, as `server.Served` wants it."""

    def __init__(self, config: Config, slot: int, path: str, environ: Mapping[str, str] = os.environ) -> None:
        self.slot = slot
        self.environ = environ
        self.share = max(1, config.workers.count)
        self._path = path
        self._number = 0
        self._document: dict[str, Any] | None = None
        self._learnt: dict[str, Any] | None = None  # by the core, for the one after it
        self.fleet = Mirror(self._sign)
        self.scheduler = RemoteScheduler(self.fleet, config.workers.answer_s, self._hung)
        self.proxy = HandProxy(
            self.scheduler, self.fleet, self.part(config), self.scheduler.recorded, Tenants.of(config, environ)
        )
        self.proxy.told = self._made
        self.lag = LoopLag(self._lagged)
        self.asking = Asking(self._ask)
        self.viewers = Viewers(self.asking)
        self._link: Link | None = None
        self._calling: asyncio.Task[None] | None = None
        self._stating: asyncio.TimerHandle | None = None
        self._hang_up = False
        self._core_lag_s = 0.0
        self._refused: dict[str, int] = {}
        self.welcome = asyncio.Event()

    def part(self, config: Config) -> Config:
        """What of the host's limits is this hand's."""
        limits, retry = config.limits, config.retry
        receiving = max(limits.max_body_bytes, limits.receiving_bytes // self.share)
        return config.model_copy(
            update={
                "limits": limits.model_copy(update={"receiving_bytes": receiving}),
                "retry": retry.model_copy(update={"budget_per_s": retry.budget_per_s / self.share}),
            }
        )

    @property
    def config(self) -> Config:
        return self.proxy.config

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.lag.start()
        self._calling = asyncio.create_task(self._call())
        self._calling.add_done_callback(_report)
        self._state()
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_WELCOME_S):
                await self.welcome.wait()

    def drain(self) -> None:
        if not self.proxy.draining:
            self.proxy.draining = True
            for exchange in self.proxy.held():
                exchange.on_decision(Shed(exchange.record.request_id, "draining", 1.0))

    def cut(self) -> None:
        """Ends what is still open."""
        self.proxy.cut()
        self.viewers.close()

    @property
    def open_requests(self) -> int:
        return len(self.proxy.live)

    async def stop(self) -> None:
        if self._calling is not None:
            self._calling.cancel()
        if self._stating is not None:
            self._stating.cancel()
        self.lag.stop()
        self.scheduler.stop()
        self.proxy.close()
        if self._link is not None:
            self._link.close()

    def reload(self) -> None:
        """The core reads the configuration; hands are told."""

    # -- ASGI ------------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
        elif path == "/health":
            await health(send)
        elif path == "/ready" and (self.proxy.draining or self._link is None):
            ready = not self.proxy.draining and self.fleet.any_available() is not None
            await self._ready(send, ready)
        elif path in live.PATHS:
            await self.viewers.stream(scope, receive, send)
        elif path.startswith(CONTROL):
            await self.asking(scope, receive, send)
        else:
            await asgi.serve(self.proxy, scope, receive, send)

    async def _ready(self, send: Send, ready: bool) -> None:
        body = b"ready\n" if ready else b"draining\n" if self.proxy.draining else b"no replica is available\n"
        lines = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200 if ready else 503, "headers": lines})
        await send({"type": "http.response.body", "body": body})

    # -- the core --------------------------------------------------------------------------------------------------

    async def _call(self) -> None:
        """Calls until a core answers, and again whenever there is none."""
        loop = asyncio.get_running_loop()
        while not told_to_end():
            lost = loop.create_future()
            link = Link(self._heard, lambda lost=lost: None if lost.done() else lost.set_result(None))  # type: ignore[misc]
            try:
                await loop.create_unix_connection(partial(cast, asyncio.Protocol, link), self._path)
            except OSError:
                await asyncio.sleep(CALL_S)
                continue
            self._calling_link, self._lost = link, lost
            known = [self._number, self._document, self.fleet.seen, self._learnt]
            link.tell([To.HELLO, self.slot, os.getpid(), *known])
            try:
                await lost
            finally:
                link.leave()  # a core that is only slow reads on: what it was told is on record and paid for
            if self._link is not None:
                log.warning("hand %d has no core", self.slot)
            self._alone()
            await asyncio.sleep(HUNG_S if self._hang_up else CALL_S)
            self._hang_up = False

    def _alone(self) -> None:
        if self._link is not None:
            self._link = None
            self.asking.nobody()
            self.scheduler.alone()

    def _hung(self) -> None:
        self._hang_up = True
        if not self._lost.done():
            self._lost.set_result(None)
        self._alone()

    def _heard(self, message: Message) -> None:
        kind = message[0]
        if DISPATCH <= kind <= ABORT:
            self.scheduler.heard(message)
        elif kind == To.PRESSED:
            self.scheduler.pressed = message[1]
        elif kind == To.PREFILL:
            meter = self.scheduler.meters.get(message[1])
            if meter is not None:
                meter.prefilling = message[2]
        elif kind == To.METER:
            self.scheduler.dispatched(message[1]).tokens_per_event = message[2]
        elif kind == To.FLEET:
            self.fleet.show(message[1])
            self.proxy.prune()
            for id in self.scheduler.meters.keys() - self.fleet.replicas.keys():
                del self.scheduler.meters[id]
        elif kind in (To.CONFIG, To.WELCOME):
            self._configured(*message[1:])
            if kind == To.WELCOME:
                self._link = self._calling_link
                self.scheduler.connected(self._link)
                self.welcome.set()
        elif kind == To.ANSWER:
            self.asking.answered(message)
        elif kind == To.LOOK:
            self._look(message[1])
        elif kind == To.GIVE_UP:
            self.proxy.give_up_on(message[1], message[2])
        elif kind == To.MADE:
            Proxy.made(self.proxy, message[1], message[2])
        elif kind == To.LEARNT:
            self._learnt = message[1]
        elif kind == To.LAG:
            self._core_lag_s = message[1]

    def _configured(self, number: int, document: dict[str, Any], reads_prefix: bool) -> None:
        self.scheduler.reads_prefix = reads_prefix
        if document != self._document:
            config = build(document)
            self.scheduler.answer_s = config.workers.answer_s
            tenants = Tenants.of(config, self.environ)
            tenants.adopt(self.proxy.tenants)
            self.proxy.configure(self.part(config), tenants)
        self._number, self._document = number, document

    def _ask(self, message: Message) -> bool:
        if self._link is None:
            return False
        self._link.tell(message)
        return True

    def _sign(self, replica_id: str, sign: Sign) -> None:
        if self._link is not None:
            self._link.tell([To.SIGN, replica_id, sign.value])

    def _look(self, request_id: str) -> None:
        """The core wants to look into a prompt: its body, unless it is gone already or too large."""
        exchange = self.scheduler.owner(request_id)
        admission = exchange.admission if isinstance(exchange, Exchange) else None
        if admission is not None and admission.call.document is not None and self._link is not None:
            body = admission.call.body
            if len(body) <= MOST_BODY_BYTES:
                self._link.tell([To.BODY, request_id, admission.endpoint.api.value, body.decode("latin-1")])

    def _made(self, response_id: str, replica_id: str) -> None:
        if self._link is not None:
            self._link.tell([To.MADE, response_id, replica_id])

    def _lagged(self, mean_s: float) -> None:
        self.proxy.door.lagged(max(mean_s, self._core_lag_s))
        self._core_lag_s *= 0.9

    def _state(self) -> None:
        """Once a second: what the core cannot know otherwise."""
        self._stating = asyncio.get_running_loop().call_later(STATE_S, self._state)
        if self._link is None:
            return
        door, answers = self.proxy.door, self.scheduler.answers
        refused = {of: n - self._refused.get(of, 0) for of, n in door.refused.items()}
        self._refused = dict(door.refused)
        awaits, silent = self.proxy.count_by_replica(self.config.health.hang_s)
        self._link.tell(
            [
                To.STATE,
                {
                    "awaits": awaits,
                    "silent": silent,
                    "open": self.open_requests,
                    "lag_s": self.lag.mean_s,
                    "lag_max_s": self.lag.worst_s(),
                    "receiving_bytes": door.receiving_bytes,
                    "shedding": door.shedding,
                    "refused": refused,
                    "draining": self.proxy.draining,
                    "local": self.scheduler.local,
                    "answers": [list(answers.counts), answers.total],
                },
            ]
        )


class HandProxy(Proxy):
    """A proxy that tells others which replica made a response, and counts for the core."""

    told: Callable[[str, str], None] | None = None

    def made(self, response_id: str, replica_id: str) -> None:
        super().made(response_id, replica_id)
        if self.told is not None:
            self.told(response_id, replica_id)

    def count_by_replica(self, silent_s: float) -> tuple[dict[str, int], dict[str, int]]:
        """`awaits` and `silent` of every replica in one pass."""
        awaits: dict[str, int] = {}
        silent: dict[str, int] = {}
        now = time.monotonic()
        for exchange in self.live:
            relay, id = exchange.relay, exchange.record.replica_id
            if relay is None or relay.over or id is None or exchange.client.paused:
                continue
            awaits[id] = awaits.get(id, 0) + exchange.endpoint.takes_steps
            if relay.content_events > 0 and now - relay.last_sign_at >= silent_s:
                silent[id] = silent.get(id, 0) + 1
        return awaits, silent


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the hand stopped calling for a core", exc_info=error)
