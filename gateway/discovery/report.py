"""What a source of replicas tells: its whole list, or why it could not be read. For log, /metrics and /admin."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.discovery.membership import Member

log = logging.getLogger("forebay.discovery")


class SourceError(Exception):
    """A source cannot be read; the text says why, in words for the operator."""


@dataclass(slots=True)
class Report:
    """One per source. `take` carries a list out; `heard` is called once the source has said all it knows."""

    source: str
    take: Callable[[Iterable[Member]], object]
    heard: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    members: int = 0
    read_at: float | None = None  # when the source last answered
    failures: int = 0
    trouble: str | None = None

    def told(self, members: Iterable[Member], whole: bool = True) -> None:
        """`whole` is False while parts of the source have not answered yet."""
        listed = list(members)
        self.members, self.read_at = len(listed), self.clock()
        self.take(listed)
        if whole:
            self.heard()

    def fine(self) -> None:
        """It answers, and nothing else is to say."""
        self.read_at = self.clock()
        if self.trouble is not None:
            log.info("%s: answers again", self.source)
        self.trouble = None

    def failed(self, why: str) -> None:
        """Nothing changes in the fleet; the log says it when it begins or becomes another reason."""
        self.failures += 1
        if why != self.trouble:
            log.warning("%s: %s; the replicas known so far stay", self.source, why)
        self.trouble = why
