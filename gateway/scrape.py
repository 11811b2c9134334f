"""Reads a replica's /metrics and /v1/models over httpx: control traffic, a second apart, never on a request's path.

A page is had whole within its time and below `MOST_BYTES`, or not at all: one that trickles or never ends must neither
stop the watch of its replica nor fill the memory. Uncompressed, since it costs both sides less and cannot explode.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import orjson

from gateway.replica import Replica
from gateway.vllm_metrics import read
from policies.model import Scraped

MOST_BYTES = 16 * 1024 * 1024  # of a page; vLLM's have 50 KB


class ReadError(Exception):
    """The page could not be had; the text says why, in words for the operator."""


def client(replica: Replica) -> httpx.AsyncClient:
    """A client for one replica. Proxy variables of the environment are ignored: replicas are addressed directly."""
    verify: ssl.SSLContext | bool = False  # nothing to verify on plain HTTP, and loading authorities takes 20 ms
    if replica.tls:
        verify = ssl.create_default_context(cafile=replica.ca_file)
    headers = {"accept-encoding": "identity"}
    if replica.key:
        headers["authorization"] = f"Bearer {replica.key}"
    limits = httpx.Limits(max_connections=8, keepalive_expiry=4.0)  # vLLM closes idle connections after 5 s
    return httpx.AsyncClient(trust_env=False, verify=verify, headers=headers, limits=limits)


async def fetch(http: httpx.AsyncClient, url: str, timeout_s: float, body: Any = None) -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST of `body` as JSON. Raises httpx.HTTPError for whatever went wrong."""
    request = http.build_request("GET" if body is None else "POST", url, json=body, timeout=timeout_s)
    content = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            answer = await http.send(request, stream=True)
            try:
                async for part in answer.aiter_raw():
                    content += part
                    if len(content) > MOST_BYTES:
                        raise httpx.ReadError(f"the answer is larger than {MOST_BYTES} bytes")
            finally:
                await answer.aclose()
    except TimeoutError:
        raise httpx.ReadTimeout("the answer is not whole") from None
    return answer.status_code, bytes(content)


async def metrics(http: httpx.AsyncClient, replica: Replica, timeout_s: float, clock: Callable[[], float]) -> Scraped:
    """One read of /metrics. Raises ReadError."""
    content = await _page(http, f"{replica.url}/metrics", timeout_s)
    return read(content.decode("utf-8", "replace"), replica.id, clock())


async def models(http: httpx.AsyncClient, replica: Replica, timeout_s: float) -> list[Mapping[str, Any]]:
    """The rows of /v1/models. Raises ReadError."""
    content = await _page(http, f"{replica.url}/v1/models", timeout_s)
    try:
        rows = orjson.loads(content)["data"]
        return [row for row in rows if isinstance(row, dict)]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ReadError("/v1/models answered something else than a list of models") from None


async def _page(http: httpx.AsyncClient, url: str, timeout_s: float) -> bytes:
    path = httpx.URL(url).path
    try:
        status, content = await fetch(http, url, timeout_s)
    except httpx.TimeoutException:
        raise ReadError(f"{path} took longer than {timeout_s:g} s") from None
    except httpx.HTTPError as e:
        raise ReadError(f"{path} could not be read: {e or type(e).__name__}") from None
    if status == 401:
        raise ReadError(f"{path} answered 401: set key_env of this replica to a variable with its API key")
    if status != 200:
        raise ReadError(f"{path} answered {status}")
    return content
