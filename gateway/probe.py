"""Asks a replica whether it lives, and, after an ejection, for one token. The answer is a `Sign`, None for good.

/health proves that the API server runs and that its engine is not known dead; nothing about hangs, pauses or a
drain. One token (`max_tokens: 1`) proves the whole path at the price of one engine step, so only an ejected
replica is asked for it.
"""

from __future__ import annotations

import orjson

from gateway.fetch import Fetcher, FetchError, FetchTimeoutError
from gateway.replica import Replica
from gateway.signals import Sign


async def health(asked: Fetcher, timeout_s: float) -> Sign | None:
    try:
        status, _ = await asked.fetch("/health", timeout_s)
    except FetchError as e:
        return e.sign
    if status == 503:
        return Sign.ENGINE_DEAD
    return None if 200 <= status < 300 else Sign.PROBE_FAILED


async def token(asked: Fetcher, replica: Replica, timeout_s: float) -> Sign | None:
    """One token of any base model. A replica that cannot generate answers 4xx, which is good enough: it answers."""
    model = min(replica.base_models, default="")
    body = {"model": model, "prompt": "1", "max_tokens": 1}
    try:
        status, content = await asked.fetch("/v1/completions", timeout_s, body)
    except FetchTimeoutError:
        return Sign.FIRST_EVENT_TIMEOUT
    except FetchError as e:
        return e.sign
    if status == 503:
        return None if b"EngineDead" not in content else Sign.ENGINE_DEAD  # its queue limit: busy, so alive
    if status >= 500:
        return Sign.ERROR_STATUS
    return Sign.ABORT if _aborted(content) else None


def _aborted(content: bytes) -> bool:
    try:
        choices = orjson.loads(content).get("choices") or []
        return any(choice.get("finish_reason") == "abort" for choice in choices)
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        return False
