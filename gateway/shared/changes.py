"""Runtime changes of fleet and configuration, told to all gateways in one order: a stream in Redis.

Who changes something applies it at once and appends it; everybody reads what is new with each exchange of registers
and applies it in the order of the stream, the author its own again where others came between, so that two changes
made at the same time end the same everywhere. What could not be appended because Redis was away is kept and appended
later. A gateway that starts follows from then on: what it runs with first is its file. Tables that belong to one
gateway are never told.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

import orjson

from gateway.config import ConfigError
from gateway.control import Control
from gateway.shared.store import Command, Store

OWN = ("listen", "workers", "redis", "journal", "prefixes", "metrics", "admin")
KEPT = 100
log = logging.getLogger("forebay.shared")


class Changes:
    """`control` is set by whoever makes it."""

    control: Control

    def __init__(self, store: Store, me: str) -> None:
        self._key = store.key("changes")
        self._me = me
        self._read = ""  # id of the entry read last; empty: not yet known where the stream ends
        self._due: deque[bytes] = deque(maxlen=KEPT)
        self._out = 0  # own changes that have not come back yet
        self._again = 0  # how many of them others have overtaken
        self._taking = False  # a change of others is being applied: it is not told again

    def tell(self, kind: str, **what: Any) -> None:
        """`kind`: patch (`tables`) or drain (`replica`, `draining`)."""
        if self._taking:
            return
        if kind == "patch":
            what["tables"] = {name: table for name, table in what["tables"].items() if name not in OWN}
            if not what["tables"]:
                return
        self._due.append(orjson.dumps({"by": self._me, "kind": kind, **what}))

    def commands(self) -> list[Command]:
        """What is new, then what is due; `heard` takes the answers in this order."""
        if not self._read:
            read: Command = ("XREVRANGE", self._key, "+", "-", "COUNT", 1)
        else:
            read = ("XRANGE", self._key, f"({self._read}", "+", "COUNT", KEPT)
        return [read, *(("XADD", self._key, "MAXLEN", "~", KEPT, "*", "change", one) for one in self._due)]

    def heard(self, answers: list[Any]) -> None:
        rows, appended = answers[0], answers[1:]
        for answer in appended:
            if isinstance(answer, Exception):
                break  # Redis is full: again with the next exchange
            self._due.popleft()
            self._out += 1
        if isinstance(rows, Exception):
            return
        first = not self._read
        for id, fields in rows:
            self._read = id.decode()
            if not first:
                try:
                    self._one(orjson.loads(fields[b"change"]))
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    log.error("a change that stands in Redis cannot be read and is passed over: %r", error)
        if first and not self._read:
            self._read = "0-0"

    def _one(self, change: Mapping[str, Any]) -> None:
        if change["by"] != self._me:
            self._again = self._out
            self._apply(change)
            return
        self._out = max(0, self._out - 1)
        if self._again:  # others changed something between our change and its place in the stream
            self._again -= 1
            self._apply(change)

    def _apply(self, change: Mapping[str, Any]) -> None:
        self._taking = True
        try:
            if change["kind"] == "drain":
                if self.control.fleet.get(change["replica"]) is not None:
                    self.control.fleet.drain(change["replica"], change["draining"])
            elif not self.control.has(change["tables"]):
                lines = self.control.change(change["tables"], f"gateway {change['by']}")
                log.info("changed by gateway %s: %s", change["by"], "; ".join(lines) or "nothing changed")
        except ConfigError as error:
            log.error("a change by gateway %s is refused here: %s", change["by"], "; ".join(error.lines))
        finally:
            self._taking = False
