"""Token buckets of tenants in a real Redis: what is short is named, and how long it takes until it is not."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.shared import quotas
from gateway.tenants import Bucket, Tenant
from tests.gateway.shared.pair import Server

FREE = Bucket(None, 1.0)
REQUESTS = "this key is over its rate of requests: 0.01 requests per second, 2 at once"
TOKENS = "this key is over its rate of tokens: 0.1 tokens per second, 100 at once"


class Named:
    """What is asked of a `Store`."""

    def key(self, *parts: str) -> str:
        return ":".join(parts)


@pytest.mark.parametrize(
    ("requests", "tokens", "said", "wait_s"),
    [
        (Bucket(0.01, 2.0), FREE, REQUESTS, 100.0),
        (FREE, Bucket(0.1, 100.0), TOKENS, 200.0),
        (Bucket(0.01, 2.0), Bucket(0.1, 100.0), TOKENS, 200.0),  # both are short: the longer wait is told
        (Bucket(0.01, 2.0), Bucket(1.0, 100.0), REQUESTS, 100.0),
    ],
)
def test_what_is_short_is_named_with_its_limit(
    server: Server, requests: Bucket, tokens: Bucket, said: str, wait_s: float
) -> None:
    """Two requests of 40 tokens fit, and the third does not."""
    one: Any = Tenant("acme", (), None, 1.0, None, requests, tokens)
    store: Any = Named()
    first, second, third = (
        quotas.refused(one, server.client.execute_command(*quotas.take(store, one, 40))) for _ in range(3)
    )
    assert (first, second) == (None, None)
    assert third is not None
    assert third.message == f"{said}; wait as long as Retry-After says"
    assert third.retry_after_s is not None
    assert wait_s - 20.0 < third.retry_after_s <= wait_s
