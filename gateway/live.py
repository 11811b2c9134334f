"""`/dashboard` and its stream: one snapshot a second for all who look, and none while nobody does.

`GET /admin/live` is a stream of server-sent events behind the admin guard; the page reads it with fetch, since an
EventSource cannot send the token. The first viewer starts the clock, the last one stops it. A change in the fleet is
told at once, with at most ten events a second. A viewer that reads slowly gets the newest snapshot and misses those
between. The page itself is three files without a secret or an outside address in them, and may be fetched by anyone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gateway.lost_cancel import told_to_end

INTERVAL_S = 1.0
SOONEST_S = 0.1
FRESH_S = 0.9
PATHS = ("/admin/live", "/admin/v1/live")
MOST_VIEWERS = 64
HISTORY = 300  # snapshots whose totals a new viewer gets for its sparklines
HERE = Path(__file__).parent
FILES = {
    "/dashboard": ("dashboard.html", "text/html; charset=utf-8"),
    "/dashboard/live.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard/live.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "/dashboard/draw.js": ("dashboard_draw.js", "text/javascript; charset=utf-8"),
    "/dashboard/panels.js": ("dashboard_panels.js", "text/javascript; charset=utf-8"),
    "/dashboard/icon.svg": ("dashboard.svg", "image/svg+xml"),
}
SAFE = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Live:
    """One per process. `read` computes a snapshot; it is called only while there are viewers."""

    def __init__(self, read: Callable[[float], dict[str, Any]], clock: Callable[[], float] = time.monotonic) -> None:
        self.viewers = 0
        self.computed = 0
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._read = read
        self._clock = clock
        self._latest = b""
        self._snapshot = b""
        self._taken_at = -INTERVAL_S
        self._news = asyncio.Event()  # replaced with each snapshot
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def changed(self) -> None:
        """Something happened that an operator should see now."""
        self._hurry.set()

    def close(self) -> None:
        """Ends every stream."""
        self._closed = True
        self._news.set()
        if self._task is not None:
            self._task.cancel()

    async def stream(self) -> AsyncIterator[bytes]:
        """Events of one viewer: `history` first, then a `snapshot` each second."""
        self.viewers += 1
        try:
            if self._task is None and not self._closed:
                self._latest = b""
                self.history.clear()
                self._task = asyncio.create_task(self._run(), name="live page")
            yield b"retry: 1000\n\n" + _event("history", list(self.history))
            told = 0
            while not self._closed:
                if self._latest and told != self.computed:
                    told = self.computed
                    yield self._latest
                else:
                    await self._news.wait()
        finally:
            self.viewers -= 1
            if self.viewers == 0 and self._task is not None:
                self._task.cancel()
                self._task = None

    def newest(self) -> bytes:
        """One snapshot as JSON, for who asks now and then; at most `INTERVAL_S` old."""
        now = self._clock()
        if now - self._taken_at >= FRESH_S:
            self._take(now)
        return self._snapshot

    def _take(self, now: float) -> None:
        taken = self._read(now)
        self.computed += 1
        self._taken_at = now
        self.history.append(_point(taken))
        self._snapshot = orjson.dumps(taken)

    async def _run(self) -> None:
        while not told_to_end():
            self._take(self._clock())
            self._latest = b"event: snapshot\ndata: %b\n\n" % self._snapshot
            news, self._news = self._news, asyncio.Event()
            news.set()
            self._hurry.clear()
            await asyncio.sleep(SOONEST_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S - SOONEST_S):
                    await self._hurry.wait()


def _event(name: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


def _point(taken: dict[str, Any]) -> dict[str, Any]:
    """What the sparklines are drawn from."""
    return {
        "unix": taken["unix"],
        "total": taken["total"],
        "open": taken["open"],
        "held": taken["held"],
        "loop_lag_s": taken["loop_lag_s"],
        "in_flight": {r["id"]: r["in_flight"] for r in taken["replicas"]},
        "classes": {c["name"]: c["attainment"] for c in taken["classes"]},
    }


def mount(app: FastAPI, live: Live) -> None:
    """Adds the page and its stream to the control plane."""
    for path, (name, kind) in FILES.items():
        app.get(path, include_in_schema=False)(_file(HERE / name, kind))

    @app.get("/admin/snapshot")
    async def one(history: bool = False) -> Response:
        """What the live page draws, once: fleet, classes, queue, experiment, prompt families, what went wrong lately.

        ?history=true: the points of the last minutes that the sparklines are drawn from, where somebody looked.
        """
        newest = live.newest()
        body = orjson.dumps(list(live.history)) if history else newest
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    @app.get("/admin/live")
    async def stream(request: Request) -> Response:
        """Server-sent events for the live page: `history` once, then a `snapshot` each second."""
        if live.viewers >= MOST_VIEWERS:
            return JSONResponse({"errors": [f"{MOST_VIEWERS} viewers are served already"]}, 503)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(live.stream(), media_type="text/event-stream", headers=headers)


def _file(path: Path, kind: str) -> Callable[[], Any]:
    content = path.read_bytes()

    async def serve() -> Response:
        return Response(content, media_type=kind, headers=SAFE)

    return serve
