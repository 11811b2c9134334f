"""Paths of one simulated replica, and the listening socket that faults open and close.

vLLM's own paths (`/v1/...`, `/tokenize`, `/health`, `/metrics`, ...) answer as recorded; generating ones go to the
engine. `POST /forebay/fault {"kind": ...}` orders a fault (see `faults.py`), `GET /forebay/sim` reports lag and
engine time.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

from loadtests import ports, tokens
from loadtests.faults import Command, Faults
from loadtests.live_replica import LAG_LIMIT_S, Replica, ReplicaSettings
from loadtests.replica_api import ApiError, parse, prompt_of
from loadtests.replica_http import Exchange, ReplicaProtocol
from loadtests.replica_metrics import exposition
from loadtests.replica_shapes import FINGERPRINT

_GENERATING = {
    "/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/responses": "responses",
    "/v1/messages": "messages",
}  # fmt: skip
_METRICS_TYPE = b"text/plain; version=1.0.0; charset=utf-8"


class Routes:
    """One replica behind one port. `peers` are all replicas of the process, by index."""

    def __init__(self, settings: ReplicaSettings, host: str, port: int, name: str = "sim") -> None:
        self.replica = Replica(settings, name)
        self.settings = settings
        self.host, self.port = host, port
        self.peers: Sequence[Routes] = [self]
        self.connections: set[ReplicaProtocol] = set()
        self._server: asyncio.Server | None = None
        self._held: socket.socket | None = None  # of a port that it chose: its own also while it refuses
        self._loop = asyncio.get_running_loop()
        self._undo: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._get: dict[str, Callable[[Exchange], None]] = {
            "/health": self._health,
            "/ping": self._health,
            "/metrics": lambda x: x.respond(200, exposition(self.replica), _METRICS_TYPE),
            "/version": lambda x: x.respond(200, {"version": FINGERPRINT.split("-")[1]}),
            "/load": lambda x: x.respond(200, {"server_load": len(self.replica.answers)}),
            "/v1/models": self._models,
            "/is_sleeping": lambda x: x.respond(200, {"is_sleeping": self.replica.faults.frozen == "sleep"}),
            "/is_paused": lambda x: x.respond(200, {"is_paused": self.replica.faults.frozen == "pause"}),
            "/kv_event_sources": lambda x: x.respond(200, {}),
            "/forebay/sim": self._sim,
        }
        self._post: dict[str, Callable[[Exchange], None]] = {
            "/ping": self._health,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/messages/count_tokens": self._count_tokens,
            "/reset_prefix_cache": lambda x: x.respond(200, {"success": self.replica.reset_prefix_cache()}),
            "/sleep": lambda x: self._ordered(x, "sleep", {"status": "sleeping", "level": 1}),
            "/wake_up": lambda x: self._ordered(x, "clear", {"status": "awake", "tags": None}),
            "/pause": lambda x: self._ordered(x, "pause", {"status": "paused"}),
            "/resume": lambda x: self._ordered(x, "clear", {"status": "resumed"}),
            "/forebay/fault": self._fault,
        }

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listens; a port of 0 takes a free one and keeps it."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            if not self.port:
                self._held = ports.hold(self.host)
                self.port = self._held.getsockname()[1]
            self._server = await loop.create_server(
                lambda: ReplicaProtocol(self), self.host, self.port, backlog=2048, reuse_address=True
            )

    def refuse(self) -> None:
        """New connects are refused; idle connections close, busy ones go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def stop(self) -> None:
        self.refuse()
        if self._held is not None:
            self._held.close()
        self.replica.stop()
        if self._undo is not None:
            self._undo.cancel()
        for connection in list(self.connections):
            connection.transport.close()

    def order(self, command: Command) -> None:
        """Carry out a fault; with `for_s` it is cleared by itself."""
        replica, faults, kind = self.replica, self.replica.faults, command.kind
        if kind == "slow":
            faults.slow = command.factor
        elif kind in ("hang", "pause", "sleep"):
            replica.freeze(kind)
        elif kind in ("error", "cut"):
            faults.strike_kind, faults.strike_tokens, faults.strikes_left = kind, command.after, command.count
        elif kind == "unhealthy":
            faults.unhealthy = True
        elif kind == "drain":
            faults.draining = True
        elif kind == "refuse":
            self.refuse()
        elif kind == "crash":
            replica.crash()
            self.refuse()
        elif kind == "abort":
            faults.draining = True
            replica.abort_all()
            self.refuse()
        elif kind == "kill":
            self.refuse()
            for connection in list(self.connections):
                connection.transport.close()
            replica.freeze("dead")
        elif kind == "restart":
            for connection in list(self.connections):
                connection.transport.close()
            replica.restart()
            self._listen()
        else:
            self._clear()
        if command.for_s and kind != "clear":
            if self._undo is not None:
                self._undo.cancel()
            dead = kind in ("crash", "kill", "abort")
            self._undo = self._loop.call_later(command.for_s, self.order, Command("restart" if dead else "clear"))

    def _clear(self) -> None:
        dead = self.replica.faults.frozen == "dead"
        if dead:
            self.replica.restart()
        frozen = self.replica.faults.frozen is not None
        self.replica.faults = Faults()
        if frozen:
            self.replica.thaw()
        self._listen()

    def _listen(self) -> None:
        if self._server is None:
            task = self._loop.create_task(self.start())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    # -- requests --------------------------------------------------------------------------------------------------

    def handle(self, x: Exchange) -> None:
        path = x.path
        key = self.settings.api_key
        if key and path.startswith(("/v1", "/v2", "/inference", "/cohere")):
            given = x.headers.get(b"authorization", b"") or b"Bearer " + x.headers.get(b"x-api-key", b"")
            if given != b"Bearer " + key.encode():
                x.id = ""
                x.respond(401, {"error": "Unauthorized"})
                return
        api = _GENERATING.get(path)
        if api is not None and x.method == "POST":
            self._generate(x, api)
            return
        routes = self._get if x.method in ("GET", "HEAD") else self._post if x.method == "POST" else {}
        route = routes.get(path)
        if route is not None:
            try:
                route(x)
            except ApiError as refusal:
                x.respond(refusal.status, refusal.body)
            except ValueError as problem:
                x.respond(400, ApiError(400, str(problem)).body)
            return
        allowed = [m for m, known in ((b"GET", self._get), (b"POST", self._post)) if path in known]
        if api is not None:
            allowed = [b"POST"]
        if allowed:
            x.respond(405, {"detail": "Method Not Allowed"}, extra=b"allow: " + b", ".join(allowed) + b"\r\n")
        else:
            x.respond(404, {"detail": "Not Found"})

    def _generate(self, x: Exchange, api: str) -> None:
        replica = self.replica
        try:
            if not x.headers.get(b"content-type", b"application/json").lower().startswith(b"application/json"):
                raise ApiError(
                    400,
                    "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
                    "Bad Request",
                )
            if replica.faults.frozen == "dead":
                raise ApiError(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                               "InternalServerError")  # fmt: skip
            priority = x.headers.get(b"x-vllm-priority")
            call = parse(
                api, bytes(x.body), self.settings.model, self.settings.adapters, replica.engine.max_model_len,
                priority.decode("latin-1") if priority else None,
            )  # fmt: skip
            call.request_id = x.id if b"x-request-id" in x.headers else x.id[:16]
            x.body = b""
            x.answer = replica.submit(call, x)
        except ApiError as refusal:
            x.respond(refusal.status, refusal.body)
        except (AttributeError, TypeError, ValueError) as problem:  # a body of the wrong shape somewhere
            x.respond(400, ApiError(400, f"1 validation error:\n  {problem}", "Bad Request").body)

    def _health(self, x: Exchange) -> None:
        bad = self.replica.faults.unhealthy or self.replica.faults.frozen == "dead"
        x.respond(503 if bad else 200, b"", empty=True)

    def _models(self, x: Exchange) -> None:
        created, length = int(self.replica.started_at), self.replica.engine.max_model_len
        base = self.settings.model
        x.respond(200, {"object": "list", "data": [
            {"id": name, "object": "model", "created": created, "owned_by": "vllm", "root": name,
             "parent": None if name == base else base, "max_model_len": length if name == base else None,
             "permission": []}
            for name in (base, *self.settings.adapters)
        ]})  # fmt: skip

    def _tokenize(self, x: Exchange) -> None:
        body = _object(x)
        packed = prompt_of(body)
        cut = range(0, len(packed), tokens.TOKEN_BYTES)
        strings = [packed[i : i + 4].decode("utf-8", "replace") for i in cut] if body.get("return_token_strs") else None
        x.respond(200, {
            "count": tokens.count(packed), "max_model_len": self.replica.engine.max_model_len,
            "tokens": tokens.ids_of(packed), "token_strs": strings,
        })  # fmt: skip

    def _detokenize(self, x: Exchange) -> None:
        packed = tokens.from_ids(_object(x).get("tokens") or [])
        x.respond(200, {"prompt": packed.decode("utf-8", "replace")})

    def _count_tokens(self, x: Exchange) -> None:
        x.respond(200, {"input_tokens": tokens.count(prompt_of(_object(x)))})

    # -- the simulation --------------------------------------------------------------------------------------------

    def _ordered(self, x: Exchange, kind: str, body: object) -> None:
        self.order(Command(kind))
        x.respond(200, body)

    def _peer(self, x: Exchange) -> Routes:
        which = x.query.get("replica", [""])[0]
        if not which:
            return self
        if not which.isdigit() or int(which) >= len(self.peers):
            raise ValueError(f"replica {which!r} must be an index below {len(self.peers)}")
        return self.peers[int(which)]

    def _fault(self, x: Exchange) -> None:
        command = Command.of(_object(x))
        peer = self._peer(x)
        x.respond(200, {"replica": peer.url, "fault": command.kind})
        peer.order(command)

    def _sim(self, x: Exchange) -> None:
        peer = self._peer(x)
        lag = peer.replica.figures.lag_s
        counters = peer.replica.engine.counters
        faults = peer.replica.faults
        x.respond(200, {
            "replica": peer.url, "engine_time_s": peer.replica.now(), "time_scale": peer.settings.time_scale,
            "profile": peer.replica.engine.profile.name, "source": peer.replica.engine.profile.source,
            "lag_s": {"p50": lag.quantile(0.5), "p99": lag.quantile(0.99), "n": sum(lag.counts)},
            "lag_ok": lag.quantile(0.99) <= LAG_LIMIT_S, "steps": counters.steps, "preemptions": counters.preemptions,
            "frozen": faults.frozen, "draining": faults.draining, "slow": faults.slow, "listening": peer.listening,
        })  # fmt: skip

    @property
    def listening(self) -> bool:
        return self._server is not None


def _object(x: Exchange) -> dict[str, Any]:
    try:
        body = x.json()
    except ValueError:
        raise ApiError(400, "the body is not JSON", "Bad Request") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", "Bad Request")
    return body
