"""What paths there are, for people: `/docs` as one plain page, `GET /admin` as JSON.

Both are read from the OpenAPI document of the control plane and from the allow table, so they cannot fall behind. The
page asks nothing of any other host and runs no script: a gateway often stands where there is no way out.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from gateway import endpoints

RULES = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "dt{font-family:ui-monospace,monospace;margin-top:.7rem}dd{margin:0 0 0 2rem}"
)
OUTSIDE = [  # answered before the application that the document is of
    ("GET", "/health", "The process answers; says nothing about replicas."),
    ("GET", "/dashboard", "The live page."),
    ("GET", "/docs", "This page."),
    ("GET", "/openapi.json", "The control plane as an OpenAPI document."),
]


def mount(app: FastAPI) -> None:
    """Adds both to the control plane."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(page(app), media_type="text/html; charset=utf-8", headers=RULES)

    @app.get("/admin", include_in_schema=False)
    @app.get("/admin/v1", include_in_schema=False)
    async def index() -> dict[str, Any]:
        paths = {f"{method} {path}": about for method, path, about in _rows(app) if path.startswith("/admin")}
        return {"dashboard": "/dashboard", "docs": "/docs", "openapi": "/openapi.json", "paths": paths}


def page(app: FastAPI) -> str:
    rows = list(_rows(app))
    proxied = [
        *((", ".join(e.methods), path, f"{e.kind} calls") for path, e in endpoints.ALLOW.items()),
        ("GET", endpoints.MODELS_PATH, "Every model of the fleet; answered by the gateway."),
        ("GET, DELETE", "/v1/responses/{id}", "Goes to the replica that made the response."),
        ("POST", "/v1/responses/{id}/cancel", "Goes to the replica that made the response."),
    ]
    parts = [
        ("For clients", proxied),
        (
            "For load balancers, Prometheus and browsers",
            [*OUTSIDE, *(r for r in rows if not r[1].startswith("/admin"))],
        ),
        ("For operators", [r for r in rows if r[1].startswith("/admin")]),
    ]
    body = "".join(f"<h2>{title}</h2><dl>{''.join(map(_entry, entries))}</dl>" for title, entries in parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Forebay: paths</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>Forebay {escape(app.version)}</h1>"
        f'<p>{escape(app.description)} <a href="/openapi.json">/openapi.json</a> has the parameters, '
        f'<a href="/dashboard">/dashboard</a> shows the gateway live.</p>{body}</body></html>'
    )


def _rows(app: FastAPI) -> Iterator[tuple[str, str, str]]:
    """Method, path and what it does, of each operation of the document."""
    for path, operations in app.openapi()["paths"].items():
        for method, operation in operations.items():
            yield method.upper(), path, operation.get("description") or operation.get("summary", "")


def _entry(row: tuple[str, str, str]) -> str:
    method, path, about = map(escape, row)
    return f"<dt>{method} {path}</dt><dd>{about}</dd>"
