"""Reads a replica's /metrics and /v1/models over httpx: control traffic, a second apart, never on a request's path."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import orjson

from gateway.replica import Replica
from gateway.vllm_metrics import read
from policies.model import Scraped


class ReadError(Exception):
    """The page could not be had; the text says why, in words for the operator."""


def client(replica: Replica) -> httpx.AsyncClient:
    """A client for one replica. Proxy variables of the environment are ignored: replicas are addressed directly."""
    verify: ssl.SSLContext | bool = False  # nothing to verify on plain HTTP, and loading authorities takes 20 ms
    if replica.tls:
        verify = ssl.create_default_context(cafile=replica.ca_file)
    headers = {"authorization": f"Bearer {replica.key}"} if replica.key else {}
    limits = httpx.Limits(max_connections=8, keepalive_expiry=4.0)  # vLLM closes idle connections after 5 s
    return httpx.AsyncClient(trust_env=False, verify=verify, headers=headers, limits=limits)


async def metrics(http: httpx.AsyncClient, replica: Replica, timeout_s: float, clock: Callable[[], float]) -> Scraped:
    """One read of /metrics. Raises ReadError."""
    answer = await _get(http, f"{replica.url}/metrics", timeout_s)
    return read(answer.text, replica.id, clock())


async def models(http: httpx.AsyncClient, replica: Replica, timeout_s: float) -> list[Mapping[str, Any]]:
    """The rows of /v1/models. Raises ReadError."""
    answer = await _get(http, f"{replica.url}/v1/models", timeout_s)
    try:
        rows = orjson.loads(answer.content)["data"]
        return [row for row in rows if isinstance(row, dict)]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ReadError("/v1/models answered something else than a list of models") from None


async def _get(http: httpx.AsyncClient, url: str, timeout_s: float) -> httpx.Response:
    path = httpx.URL(url).path
    try:
        answer = await http.get(url, timeout=timeout_s)
    except httpx.TimeoutException:
        raise ReadError(f"{path} took longer than {timeout_s:g} s") from None
    except httpx.HTTPError as e:
        raise ReadError(f"{path} could not be read: {e or type(e).__name__}") from None
    if answer.status_code == 401:
        raise ReadError(f"{path} answered 401: set key_env of this replica to a variable with its API key")
    if answer.status_code != 200:
        raise ReadError(f"{path} answered {answer.status_code}")
    return answer
