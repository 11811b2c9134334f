"""One experiment over several gateways: what is known of it in one key, what each counted in a field of its own.

The announcement is read with each exchange. Who knows more than it says writes what both know together, on the
condition that it still says what was read; who is overtaken joins again with the next exchange. So a stop by anyone
holds everywhere after one exchange of each, who joins late takes part, and what was done while Redis was away is told
when it is back. Sums are written every second and cumulative, so adding the newest of each gateway gives what one
gateway would have counted, and a confidence sequence over it stays one. They carry the time of the last weighing and
are added to none but those of the same. While Redis is away, the last that was heard of others counts on.
Trade-off: sums of a gateway that is gone stay for a week, or until more than 64 others wrote since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from gateway.announcement import Announcement, joined, read
from gateway.config import Config, ConfigError
from gateway.experiment import Experiments
from gateway.shared.store import Command, Store
from gateway.trial import Trial

SUMS_S = 1.0  # between two writings of the sums that guard rails need
DETAILS_S = 10.0  # of those by class and prompt length, and of all once it is over
KEPT_MS = 7 * 86_400_000
MOST = 64
# KEYS: the announcement. ARGV: what it is thought to say, what it shall say.
SAY = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""
# KEYS: who wrote and when, sums by ledger. ARGV: our ledger, our sums ('': only read), how many, expiry in ms.
SUM = """
if ARGV[2] ~= '' then
  redis.call('ZADD', KEYS[1], redis.call('TIME')[1], ARGV[1])
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
  for _, old in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1 - ARGV[3])) do
    redis.call('HDEL', KEYS[2], old)
    redis.call('ZREM', KEYS[1], old)
  end
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
end
return redis.call('HGETALL', KEYS[2])
"""
log = logging.getLogger("forebay.shared")


class Trials:
    """`experiments` and `config` are set by whoever makes it; `clock` in monotonic seconds."""

    experiments: Experiments
    config: Callable[[], Config]

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._key = store.key("experiment")
        self._said = b""  # what the announcement said last
        self._known: Announcement | None = None  # the same, read
        self._refused = ""  # experiment that cannot run here
        self._due_at = {"sums": 0.0, "details": 0.0}
        self._asked: list[tuple[str, str]] = []  # kind and experiment of the sums that were asked for
        self._of = ""  # experiment that the rows are of
        self._rows: dict[str, dict[bytes, bytes]] = {"sums": {}, "details": {}}
        self._read: dict[tuple[bytes, bool], tuple[bytes, bytes | None, Trial]] = {}  # by ledger, with details or not

    def commands(self) -> list[Command]:
        """`heard` takes the answers in this order."""
        out: list[Command] = []
        trial = self.experiments.trial
        if trial is not None:
            own = trial.announcement()
            together = own if self._known is None else joined(own, self._known)
            if together != self._known:
                out.append(("EVAL", SAY, 1, self._key, self._said, orjson.dumps(together.document())))
        out.append(("GET", self._key))
        self._asked = []
        if trial is not None:
            now = self._clock()
            for kind, every_s in (("sums", SUMS_S if trial.running else DETAILS_S), ("details", DETAILS_S)):
                if now >= self._due_at[kind]:
                    self._due_at[kind] = now + every_s
                    self._asked.append((kind, trial.id))
                    out.append(self._sum(trial, kind))
        return out

    def heard(self, answers: Sequence[Any]) -> None:
        rows = answers[len(answers) - len(self._asked) :]
        said = answers[len(answers) - len(self._asked) - 1]
        for (kind, id), answer in zip(self._asked, rows, strict=True):
            if not isinstance(answer, Exception):
                if id != self._of:
                    self._of, self._rows, self._read = id, {"sums": {}, "details": {}}, {}
                self._rows[kind] = dict(zip(answer[::2], answer[1::2], strict=True))
        if not isinstance(said, Exception):
            if self._said != (said or b""):
                self._said = said or b""
                self._known = self._understood()
            if self._known is not None:
                self._hear(self._known)

    # -- what experiments ask --------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        return self._store.up

    def parts(self, trial: Trial, whole: bool) -> Sequence[Trial]:
        """Not whole: without the details, which take ten times as long to read."""
        rows = self._rows["sums"] if self._of == trial.id else {}
        own = trial.ledger.encode()
        read = [self._part(trial, ledger, sums, whole) for ledger, sums in rows.items() if ledger != own]
        return [part for part in read if part is not None]

    # -- inside ----------------------------------------------------------------------------------------------------

    def _understood(self) -> Announcement | None:
        try:
            return read(orjson.loads(self._said)) if self._said else None
        except (KeyError, TypeError, ValueError) as error:
            log.error("the experiment of the other gateways cannot be read and is overruled here: %s", error)
            return None

    def _hear(self, said: Announcement) -> None:
        try:
            self.experiments.hear(said, self.config())
            self._refused = ""
        except (ConfigError, ValueError) as error:
            if self._refused != said.id:
                self._refused = said.id
                lines = "; ".join(error.lines) if isinstance(error, ConfigError) else str(error)
                log.error("experiment %s of the other gateways cannot run here: %s", said.table.name, lines)

    def _sum(self, trial: Trial, kind: str) -> Command:
        mine = b""
        if trial.assigned:
            of = trial.sums() if kind == "sums" else trial.details() | {"weighed_unix": trial.weighed_unix}
            mine = orjson.dumps(of)
        key = self._store.key("experiment", trial.id, kind)
        return ("EVAL", SUM, 2, f"{key}:at", key, trial.ledger, mine, MOST, KEPT_MS)

    def _part(self, trial: Trial, ledger: bytes, sums: bytes, whole: bool) -> Trial | None:
        """Read once; None where it was counted under other weights or cannot be read."""
        details = self._rows["details"].get(ledger) if whole else None
        known = self._read.get((ledger, whole))
        if known is not None and known[0] == sums and known[1] == details and known[2].plan is trial.plan:
            return known[2]
        try:
            said: Mapping[str, Any] = orjson.loads(sums)
            more: Mapping[str, Any] | None = None if details is None else orjson.loads(details)
            if said["weighed_unix"] != trial.weighed_unix:
                return None
            if more is not None and more["weighed_unix"] != trial.weighed_unix:
                more = None
            part = trial.part(said, more)
        except (KeyError, TypeError, ValueError) as error:
            log.error("sums of gateway %s cannot be read: %s", ledger.decode("utf-8", "replace"), error)
            return None
        self._read[ledger, whole] = (sums, details, part)
        return part
