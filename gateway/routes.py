"""Which paths are our own and not a replica's, and the one of them that is answered before everything else."""

from __future__ import annotations

from gateway.client import Send

CONTROL = ("/ready", "/metrics", "/admin", "/docs", "/openapi.json", "/dashboard")


async def health(send: Send) -> None:
    """The process lives; nothing else is asked."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
