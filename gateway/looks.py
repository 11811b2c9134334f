"""Bodies of prompts that the core sends for, since it looks into a few of them (`prefixes.py`) and hands have them all.

A body may cost more on its way than the request itself. So one is sent for only while those before it are nearly
looked at, and its way is paid for from the same budget. What is passed over, later ones of its kind stand for.
"""

from __future__ import annotations

import time

import orjson

from gateway.hand_link import Remote
from gateway.messages import To
from gateway.prefixes import Prefixes
from policies.canonical import canonical_parts

MOST = 2  # on their way at once
BY_THE_WAY = 2.0  # what its way costs hand and link too, in what taking it costs here: as measured with 400 KB


class Looks:
    """Of all hands."""

    def __init__(self) -> None:
        self._sent_for: set[str] = set()

    def arrived(self, prefixes: Prefixes, remote: Remote) -> None:
        """A request with a chain came."""
        arrival = remote.arrival = prefixes.arrived(remote.request)
        if prefixes.wants(arrival, 0) and not prefixes.busy and len(self._sent_for) < MOST:
            self._sent_for.add(remote.request.id)
            remote.hand.link.tell([To.LOOK, remote.id])

    def came(self, prefixes: Prefixes | None, remote: Remote, api: str, body: str) -> None:
        """A body that was sent for."""
        self.over(remote)
        if prefixes is None or remote.arrival is None or not prefixes.wants(remote.arrival, len(body)):
            return
        begun = time.thread_time()
        document, made = orjson.loads(body.encode("latin-1")), remote.request
        parts = canonical_parts(api, document, model=made.model, adapter=made.adapter)
        prefixes.spent(BY_THE_WAY * (time.thread_time() - begun))
        remote.looked = prefixes.look(api, document, parts, made, remote.arrival)

    def over(self, remote: Remote) -> None:
        """It is not on its way any more: it came, or the request ended before."""
        self._sent_for.discard(remote.request.id)
