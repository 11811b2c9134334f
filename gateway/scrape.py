"""Reads a replica's /metrics and /v1/models: control traffic, a second apart, never on a request's path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from gateway.fetch import Fetcher, FetchError
from gateway.vllm_metrics import read
from policies.model import Scraped


class ReadError(Exception):
    """The page could not be had; the text says why, in words for the operator."""


async def metrics(asked: Fetcher, replica_id: str, timeout_s: float, clock: Callable[[], float]) -> Scraped:
    """One read of /metrics. Raises ReadError."""
    content = await _page(asked, "/metrics", timeout_s)
    return read(content.decode("utf-8", "replace"), replica_id, clock())


async def models(asked: Fetcher, timeout_s: float) -> list[Mapping[str, Any]]:
    """The rows of /v1/models. Raises ReadError."""
    content = await _page(asked, "/v1/models", timeout_s)
    try:
        rows = orjson.loads(content)["data"]
        return [row for row in rows if isinstance(row, dict)]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ReadError("/v1/models answered something else than a list of models") from None


async def _page(asked: Fetcher, path: str, timeout_s: float) -> bytes:
    try:
        status, content = await asked.fetch(path, timeout_s)
    except FetchError as e:
        raise ReadError(f"{path} {e}") from None
    if status == 401:
        raise ReadError(f"{path} answered 401: set key_env of this replica to a variable with its API key")
    if status != 200:
        raise ReadError(f"{path} answered {status}")
    return content
