"""Retries as the official OpenAI and Anthropic Python clients do them, so that a run shows what users cause.

Rule (openai-python 1.x `_base_client`, anthropic-sdk-python the same): at most 2 retries; `x-should-retry` decides
where it is sent; else connection errors, 408, 409, 429 and 5xx. Wait: `retry-after-ms` or `Retry-After` when
0 < seconds <= 60, else 0.5 x 2^k up to 8 s, times 1 - 0.25 x u. Never once a stream has started.
A retry is an attempt of the same logical request: same scheduled time, same deadline, counted apart.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 8.0


@dataclass(slots=True, frozen=True)
class RetryProfile:
    max_retries: int = 0

    def wait_s(
        self, retries_done: int, status: int | None, headers: Mapping[str, str], rng: random.Random
    ) -> float | None:
        """Seconds to wait before the next attempt; None: give up. `status` None means no response came."""
        if retries_done >= self.max_retries or not _retriable(status, headers):
            return None
        asked = _asked_s(headers)
        if asked is not None and 0.0 < asked <= 60.0:
            return asked
        wait = min(FIRST_WAIT_S * 2.0**retries_done, LONGEST_WAIT_S)
        return wait * (1.0 - 0.25 * rng.random())


NONE = RetryProfile(0)
OFFICIAL = RetryProfile(2)


def _retriable(status: int | None, headers: Mapping[str, str]) -> bool:
    said = headers.get("x-should-retry")
    if said in ("true", "false"):
        return said == "true"
    return status is None or status in (408, 409, 429) or status >= 500


def _asked_s(headers: Mapping[str, str]) -> float | None:
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is not None:
            try:
                return float(value) * unit_s
            except ValueError:
                continue  # an HTTP date; servers of models send seconds
    return None
