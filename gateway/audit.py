"""What was changed through the admin API, by whom, from where and when: one line each in the log, the last ones kept.

A change that was refused leaves a line too. Values are those of the configuration, which holds no secret but key
hashes, and those show as "changed" only.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field

log = logging.getLogger("forebay.audit")
KEPT = 1000


@dataclass(slots=True, frozen=True)
class Line:
    at_unix: float
    who: str
    peer: str
    what: str
    changed: tuple[str, ...]
    refused: bool = False


@dataclass(slots=True)
class Audit:
    lines: deque[Line] = field(default_factory=lambda: deque(maxlen=KEPT))

    def write(self, who: str, peer: str, what: str, changed: list[str], refused: bool = False) -> None:
        self.lines.append(Line(time.time(), who, peer, what, tuple(changed), refused))
        shown = "; ".join(changed) or "nothing changed"
        log.info("%s%s by %s from %s: %s", what, " refused" if refused else "", who, peer, shown)
