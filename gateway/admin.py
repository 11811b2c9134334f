"""The control plane's HTTP: /health, /ready, /metrics, and /admin for people and scripts that run the gateway.

/health says that the process answers and nothing else: it touches no replica, since a fleet that is down must not get
its gateway killed too. /ready is for load balancers. Who may use /admin is in `access.py`. Every change, and every one
that was refused, leaves one line: who, what, from what to what. `/admin/v1/X` is `/admin/X` in its first version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import orjson
from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.registry import CollectorRegistry
from starlette.exceptions import HTTPException as StarletteHTTPException

from gateway import experiment_admin, reference
from gateway.access import Secrets
from gateway.audit import Audit
from gateway.config import ConfigError
from gateway.control import Control
from gateway.gauges import Gauges
from gateway.metrics import rendered
from gateway.version import built
from policies import POLICIES


class _Strict(Request):
    """JSON as the data path reads it: without NaN, lone surrogates, and depth or numbers without an end."""

    async def json(self) -> Any:
        return orjson.loads(await self.body())


class _StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_Strict(request.scope, request.receive))

        return strictly


def listed(path: str) -> str:
    """Where what a path names is listed."""
    return "/admin/config" if path.startswith("/admin/config/") else "/admin/fleet"


def misread(one: Mapping[str, Any]) -> str:
    """A line for a part of a request that is not what it has to be: where, what, and what would be right."""
    where, *inner = one["loc"]
    if where == "query":
        wanted = "true or false" if one["type"] == "bool_parsing" else one["msg"]
        return f'?{inner[0]} = "{str(one["input"])[:200]}": must be {wanted}'
    if one["type"] == "json_invalid":
        return f"body: is no JSON, from byte {inner[0]} on; must be a JSON object"
    if where == "body" and not inner:
        return "body: must be a JSON object"
    return f"{'.'.join(map(str, one['loc']))}: {one['msg']}"


VERSION = "/admin/v1"  # the same paths, for scripts that want to be told when their meaning changes


def application(
    control: Control, registry: CollectorRegistry, gauges: Callable[[], Gauges], secrets: Secrets, version: str
) -> FastAPI:
    app = FastAPI(
        title="Forebay",
        version=version,
        description="Control plane of the gateway. Everything under /admin needs the admin token, or loopback.",
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = _StrictRoute

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        path = request.scope["path"]  # what is routed by; the URL is put together from Host, which the client writes
        if path.startswith(f"{VERSION}/"):
            path = request.scope["path"] = f"/admin/{path.removeprefix(f'{VERSION}/')}"
        if path == "/admin" or path.startswith("/admin/"):
            who = secrets.administrator(request)
            if not isinstance(who, str):
                return who
            request.state.who = who
        elif path == "/metrics" and (refused := secrets.reader(request)) is not None:
            return refused
        return await call_next(request)

    @app.exception_handler(ConfigError)
    async def mistaken(request: Request, error: ConfigError) -> JSONResponse:
        refused_change(request, error.lines)
        return JSONResponse({"errors": error.lines}, 400)

    @app.exception_handler(RequestValidationError)
    async def unreadable(request: Request, error: RequestValidationError) -> JSONResponse:
        lines = [misread(one) for one in error.errors()]
        sent = request.headers.get("content-type", "")
        if lines and lines[0].startswith("body: ") and "json" not in sent:  # as curl -d sends it
            lines = [f'content-type = "{sent[:200]}": must be application/json, and the body a JSON object']
        refused_change(request, lines)
        return JSONResponse({"errors": lines}, 422)

    @app.exception_handler(KeyError)
    async def unknown(request: Request, error: KeyError) -> JSONResponse:
        lines = [f"{error.args[0]} is not known; GET {listed(request.scope['path'])} lists those that are"]
        refused_change(request, lines)
        return JSONResponse({"errors": lines}, 404)

    @app.exception_handler(StarletteHTTPException)
    async def elsewhere(request: Request, error: StarletteHTTPException) -> JSONResponse:
        tried = f"{request.method} {request.scope['path'][:200]}"
        lines = [f"{tried}: there is no such path; GET /admin lists those that there are"]
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            lines = [f"{tried}: this path takes {allowed}; GET /admin lists all"]
        return JSONResponse({"errors": lines}, error.status_code, headers=error.headers)

    audit = Audit()

    def written(request: Request, what: str, lines: list[str], refused: bool = False) -> None:
        audit.write(request.state.who, request.client.host if request.client else "?", what, lines, refused)

    def refused_change(request: Request, lines: list[str]) -> None:
        if request.method != "GET":
            written(request, f"{request.method} {request.scope['path']}", lines, refused=True)

    def changed(request: Request, what: str, lines: list[str]) -> dict[str, Any]:
        written(request, what, lines)
        return {"version": control.versions[-1].number, "changed": lines}

    # -- for load balancers and Prometheus ---------------------------------------------------------------------

    @app.get("/ready")
    async def ready() -> Response:
        if control.proxy.draining:
            return PlainTextResponse("draining\n", 503)
        if control.fleet.any_available() is None:
            return PlainTextResponse("no replica is available\n", 503)
        return PlainTextResponse("ready\n")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await rendered(registry), media_type=CONTENT_TYPE_LATEST)

    # -- fleet -------------------------------------------------------------------------------------------------

    @app.get("/admin/fleet")
    async def fleet() -> list[dict[str, Any]]:
        """Each replica: where it is, what it serves, its health, and what is in flight."""
        state = gauges().replicas
        rows = []
        for r in control.fleet.replicas.values():
            record = control.fleet.health.records[r.id]
            rows.append(
                {
                    "id": r.id,
                    "url": r.url,
                    "models": sorted(r.base_models),
                    "adapters": sorted(r.adapters),
                    "weight": r.weight,
                    "role": r.role,
                    "available": control.fleet.available(r.id),
                    "draining": r.draining,
                    "drained_by": sorted(r.drained_by),
                    "source": control.members.origin.get(r.id, "leaving"),
                    "phase": record.phase.value,
                    "reason": record.reason,
                    "ejections_in_a_row": record.ejections,
                    "back_in_s": max(0.0, round(record.until - control.clock(), 3)) if record.reason else 0.0,
                    "state": dataclasses.asdict(state[r.id]) if r.id in state else None,
                }
            )
        return rows

    @app.post("/admin/fleet")
    async def add(request: Request, replica: dict[str, Any] = Body(...)) -> dict[str, Any]:  # noqa: B008
        """Adds a replica: the keys of a [[replicas]] table, as {"url": "http://10.0.0.7:8000"}."""
        listed = [r.model_dump() for r in control.config.replicas]
        return changed(
            request, "replica added", control.change({"replicas": [*listed, replica]}, "admin: replica added")
        )

    @app.delete("/admin/fleet/{replica_id:path}")
    async def remove(request: Request, replica_id: str) -> dict[str, Any]:
        """Takes a replica out: it drains and is gone with its last request, at latest after discovery.drain_s."""
        kept = [r.model_dump() for r in control.config.replicas if r.name != replica_id]
        if len(kept) == len(control.config.replicas):
            source = control.members.origin.get(replica_id)
            if source is None:
                raise KeyError(f'replica "{replica_id}"')
            raise ConfigError([f'replica "{replica_id}": is named by {source}; take it out there, or drain it here'])
        return changed(request, f"replica {replica_id} removed", control.change({"replicas": kept}, "admin: removed"))

    @app.post("/admin/drain/{replica_id:path}")
    async def drain(request: Request, replica_id: str, draining: bool = True) -> dict[str, Any]:
        """No new requests for a replica; ?draining=false takes it back."""
        if control.fleet.get(replica_id) is None:
            raise KeyError(f'replica "{replica_id}"')
        control.drain(replica_id, draining)
        return changed(request, "drain", [f"replica {replica_id} draining: {str(draining).lower()}"])

    @app.get("/admin/discovery")
    async def discovery() -> list[dict[str, Any]]:
        """Each source of replicas: how many it names, how old its last answer is, and what is wrong with it."""
        now = control.clock()
        return [
            {
                "source": name,
                "members": r.members,
                "age_s": None if r.read_at is None else round(now - r.read_at, 3),
                "failures": r.failures,
                "trouble": r.trouble,
            }
            for name, r in control.sources.reports.items()
        ]

    # -- policy ------------------------------------------------------------------------------------------------

    @app.get("/admin/policy")
    async def policy() -> dict[str, Any]:
        """The running policy with its settings, and every one that is known, with its rule."""
        running = control.config.policy
        return {
            "name": running.name,
            "settings": running.settings,
            "known": {name: spec.about for name, spec in POLICIES.items()},
        }

    @app.put("/admin/policy")
    async def switch(request: Request, policy: dict[str, Any] = Body(...)) -> dict[str, Any]:  # noqa: B008
        """Switches the routing policy: {"name": "least_request", "settings": {}, "clear_index": false}."""
        clear = policy.pop("clear_index", False)
        lines = control.change({"policy": {"settings": {}, **policy}}, "admin: policy")
        if clear:
            control.forget_prefixes()
            lines.append("prefix index: cleared")
        return changed(request, "policy switched", lines)

    reference.mount(app)
    experiment_admin.mount(app, control, changed)

    # -- configuration -----------------------------------------------------------------------------------------

    @app.get("/admin/config")
    async def config() -> dict[str, Any]:
        """The running configuration, defaults included. Key hashes are left out."""
        shown = control.config.model_dump()
        for tenant in shown["tenants"].values():
            tenant["keys_sha256"] = f"{len(tenant['keys_sha256'])} left out"
        return shown

    @app.patch("/admin/config")
    async def change(request: Request, patch: dict[str, Any] = Body(...)) -> dict[str, Any]:  # noqa: B008
        """Lays tables over it, as {"pacing": {"enabled": false}}; refused whole when anything is wrong."""
        return changed(request, "configuration changed", control.change(patch, "admin: changed"))

    @app.get("/admin/config/{table}")
    async def one(table: str) -> Any:
        """One table: classes, limits, pacing, admission, tenants ..."""
        tables = await config()
        if table not in tables:
            raise KeyError(f'table "{table}"')
        return tables[table]

    @app.patch("/admin/config/{table}")
    async def change_one(request: Request, table: str, patch: dict[str, Any] = Body(...)) -> dict[str, Any]:  # noqa: B008
        """Changes one table, as {"prefill_share": 0.6} for pacing."""
        return changed(request, f"{table} changed", control.change({table: patch}, f"admin: {table}"))

    @app.get("/admin/versions")
    async def versions() -> list[dict[str, Any]]:
        """The configurations that rollback may return to, the oldest first: when each began, and why."""
        return [{"number": v.number, "at_unix": v.at_unix, "why": v.why} for v in control.versions]

    @app.get("/admin/status")
    async def status() -> dict[str, Any]:
        """The gateway in short: configuration, replicas, requests, and why the file was refused when it last was."""
        running, refused, replicas = control.versions[-1], control.refused, control.fleet.replicas
        return {
            "version": running.number,
            "build": built(),
            "since_unix": running.at_unix,
            "why": running.why,
            "refused": None if refused is None else dataclasses.asdict(refused),
            "draining": control.proxy.draining,
            "open_requests": control.proxy.open,
            "held_requests": len(control.proxy.held()),
            "replicas": len(replicas),
            "replicas_available": sum(control.fleet.available(r) for r in replicas),
        }

    @app.get("/admin/audit")
    async def lines() -> list[dict[str, Any]]:
        """Changes through this API since the start, the newest first, and those that were refused."""
        return [dataclasses.asdict(line) for line in reversed(audit.lines)]

    @app.post("/admin/reload")
    async def reload(request: Request) -> dict[str, Any]:
        """Reads the configuration file again; changes made here and not in the file are gone then."""
        return changed(request, "reload", control.reload("admin: reload"))

    @app.post("/admin/rollback")
    async def rollback(request: Request) -> dict[str, Any]:
        """Returns to the configuration before this one."""
        return changed(request, "rollback", control.rollback("admin: rollback"))

    # -- requests ----------------------------------------------------------------------------------------------

    @app.get("/admin/held")
    async def held() -> list[dict[str, Any]]:
        """Requests that are held for dispatch, the oldest first; never their text."""
        now = control.clock()
        rows = []
        for exchange in control.proxy.held():
            record = exchange.record
            rows.append(
                {
                    "request_id": record.request_id,
                    "service_class": record.service_class,
                    "tenant": record.tenant,
                    "model": record.model,
                    "prompt_tokens": record.prompt.count,
                    "waits_s": round(now - record.received_at, 3),
                }
            )
        return sorted(rows, key=lambda row: -float(row["waits_s"]))

    return app
