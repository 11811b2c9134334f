"""Which replicas are in rotation: decisions only, no I/O, no clock. Signs in, Ejected and Returned out.

Hard signs (refused, abort, engine dead, hung, asleep) eject at once. Soft signs (5xx, resets, timeouts, also of
connects) eject by statistics: several in a row, or their share in a window; then panic mode applies, as in Envoy and
Finagle: for no model may statistical ejection leave fewer than `panic_share` of its replicas, and what it took out
comes back when hard ejections make it fewer. Time out doubles from `backoff_s` to `backoff_max_s`. The way back:
back-off over, then a good probe, or one canary token where /health is known to lie, then half-open until enough
attempts succeed. Trade-off: a fleet that is bad all over keeps half of itself in, since a wrong verdict costs more
than errors do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from gateway.sections import Health
from gateway.signals import HARD, SOFT, Sign
from policies.model import Ejected, FleetEvent, Returned, Scraped

BUCKETS = 10  # of the failure window
STUCK_SCRAPES = 3  # scrapes without an engine step before `hang_s` may count
TOLD_BY_PROBE = frozenset(  # /health does not lie here
    {Sign.REFUSED, Sign.CONNECT_TIMEOUT, Sign.TLS, Sign.ENGINE_DEAD, Sign.PROBE_FAILED, Sign.PROBE_LATE}
)


class Phase(Enum):
    STARTING = "starting"  # never seen healthy
    IN = "in"
    HALF_OPEN = "half_open"
    OUT = "out"


@dataclass(slots=True)
class Beat:
    """Engine heartbeat from scrapes: steps and tokens, and since when they stand still under load."""

    steps: tuple[float | None, float | None] = (None, None)
    stuck_scrapes: int = 0
    stuck_since: float = 0.0
    started_at: float | None = None
    moved: bool = False  # its address changed; the next scrape says whether the process did
    engines: dict[str, tuple[float, int, float]] = field(default_factory=dict)  # steps, scrapes stuck at it, since


@dataclass(slots=True)
class Record:
    """Everything known about one replica's health. `window` holds [start, attempts, failures]."""

    phase: Phase = Phase.STARTING
    reason: str = "starting"
    statistical: bool = False
    draining: bool = False
    until: float = 0.0  # end of the back-off
    ejections: int = 0  # in a row
    canary: bool = False  # /health alone does not bring it back
    asleep: bool = False
    failed_in_row: int = 0
    failed_probes: int = 0
    refused_since: float | None = None  # every probe since then found the port shut, and nothing was scraped
    good_attempts: int = 0  # since it returned
    good_before: int = 0  # of these, those before the last probe
    window: deque[list[float]] = field(default_factory=lambda: deque(maxlen=BUCKETS))
    beat: Beat = field(default_factory=Beat)
    models: frozenset[str] = frozenset()

    @property
    def in_rotation(self) -> bool:
        return self.phase in (Phase.IN, Phase.HALF_OPEN)


class FleetHealth:
    """Owner of every `Record`. Each method returns the events it caused, for any replica."""

    def __init__(self, settings: Health) -> None:
        self.settings = settings
        self._bucket_s = settings.failure_window_s / BUCKETS
        self.records: dict[str, Record] = {}

    # -- questions ---------------------------------------------------------------------------------------------

    def available(self, replica_id: str) -> bool:
        record = self.records.get(replica_id)
        return record is not None and record.in_rotation and not record.draining

    def wants_canary(self, replica_id: str, now: float) -> bool:
        """Whether one token should be asked of it now: its back-off is over and /health proves nothing."""
        r = self.records.get(replica_id)
        return r is not None and r.phase is Phase.OUT and r.canary and not r.asleep and now >= r.until

    def shut(self, now: float) -> list[str]:
        """Replicas whose port has been shut for `hang_s`.

        What they hold without a byte of answer is lost: vLLM ended by SIGTERM may close its port, lose its engine and
        keep the connection of a request it will never answer.
        """
        limit_s = self.settings.hang_s
        return [i for i, r in self.records.items() if r.refused_since is not None and now - r.refused_since >= limit_s]

    def announced(self, replica_id: str) -> list[FleetEvent]:
        """What the core has to hear after an Added event: it takes a replica as available until told otherwise."""
        r = self.records[replica_id]
        if r.phase is Phase.STARTING:
            return [Ejected(replica_id, Phase.STARTING.value)]
        return [] if r.in_rotation else [Ejected(replica_id, r.reason, r.statistical)]

    # -- membership --------------------------------------------------------------------------------------------

    def add(self, replica_id: str, now: float) -> None:
        self.records[replica_id] = Record()

    def serves(self, replica_id: str, models: frozenset[str], now: float) -> list[FleetEvent]:
        self.records[replica_id].models = models
        return self._calm(now)

    def remove(self, replica_id: str, now: float) -> list[FleetEvent]:
        del self.records[replica_id]
        return self._calm(now)

    def drain(self, replica_id: str, draining: bool, now: float) -> list[FleetEvent]:
        self.records[replica_id].draining = draining
        return self._calm(now)

    def moved(self, replica_id: str) -> None:
        """Its address changed: unless the engine says that its process is the same one, it is a new one."""
        self.records[replica_id].beat.moved = True

    # -- signs -------------------------------------------------------------------------------------------------

    def sign(self, replica_id: str, sign: Sign, now: float) -> list[FleetEvent]:
        """An attempt ended, or showed content, with this sign. Unknown replicas are ignored: they were removed."""
        r = self.records.get(replica_id)
        if r is None:
            return []
        if sign in HARD:
            return self._eject(replica_id, r, sign, now)
        if not r.in_rotation or (sign is not Sign.OK and sign not in SOFT):
            return []  # late news of attempts from before the ejection, or nothing about health
        self._count(r, sign is not Sign.OK, now)
        if sign is Sign.OK:
            r.failed_in_row = 0
            r.good_attempts += 1
            if r.phase is Phase.HALF_OPEN and r.good_attempts >= self.settings.half_open_requests:
                r.phase, r.ejections = Phase.IN, 0
                return [Returned(replica_id)]
            return []
        r.failed_in_row += 1
        if r.phase is Phase.HALF_OPEN or self._too_many(r, now):
            return self._eject(replica_id, r, sign, now)
        return []

    def well(self, replica_id: str, now: float) -> bool:
        """Counts a good attempt of a replica that is in rotation and fine: the rule, so it is short. False: `sign`."""
        r = self.records.get(replica_id)
        if r is None or r.phase is not Phase.IN or not r.window:
            return False
        last = r.window[-1]
        if now - last[0] >= self._bucket_s:
            return False
        last[1] += 1
        r.failed_in_row = 0
        r.good_attempts += 1
        return True

    def probed(self, replica_id: str, failure: Sign | None, now: float) -> list[FleetEvent]:
        """/health was asked; None is a good answer."""
        r = self.records.get(replica_id)
        if r is None or failure is Sign.OURS:
            return []
        if failure is not Sign.REFUSED:
            r.refused_since = None
        elif r.refused_since is None:
            r.refused_since = now
        answers = r.good_attempts != r.good_before
        r.good_before = r.good_attempts
        if failure is Sign.PROBE_LATE and answers:
            r.failed_probes = 0  # so busy that only /health is late; without it the others would be that busy next
            return []
        if failure is None:
            r.failed_probes = 0
            if r.phase is Phase.STARTING:
                r.phase, r.reason = Phase.IN, ""
                return [Returned(replica_id), *self._calm(now)]
            if r.phase is Phase.OUT and now >= r.until and not r.asleep and not r.canary:
                return self._return(replica_id, r, now)
            return []
        r.failed_probes += 1
        if r.phase is Phase.STARTING:
            r.reason = failure.value
            return []
        if failure in HARD or r.failed_probes >= self.settings.probe_failures:
            return self._eject(replica_id, r, failure, now)
        return []

    def canaried(self, replica_id: str, failure: Sign | None, now: float) -> list[FleetEvent]:
        """The canary of an ejected replica ended; None is a token that came."""
        r = self.records.get(replica_id)
        if r is None or r.phase is not Phase.OUT or failure is Sign.OURS:
            return []
        if failure is None:
            return self._return(replica_id, r, now)
        self._back_off(r, now)
        return []

    def scraped(self, values: Scraped, in_flight: int, now: float, silent: int = 0) -> tuple[list[FleetEvent], bool]:
        """/metrics was read. Also answers whether the process is a new one since the last read.

        in_flight: requests of ours that only its engine can move on; silent: streams of these that have begun and
        have said nothing for `hang_s`.
        """
        r = self.records.get(values.replica_id)
        if r is None:
            return [], False
        r.refused_since = None
        restarted = self._restarted(r.beat, values)
        if restarted:
            r.canary, r.ejections, r.failed_in_row = False, 0, 0
            r.window.clear()
        if values.awake is False:
            r.asleep = True
            return self._eject(values.replica_id, r, Sign.ASLEEP, now), restarted
        if r.asleep and values.awake:
            r.asleep = False
            if r.phase is Phase.OUT and r.reason == Sign.ASLEEP.value:
                return self._return(values.replica_id, r, now), restarted  # put to sleep on purpose: no back-off
        stuck_engine = self._stuck_engine(r.beat, values, now) and silent > 0
        if self._stuck(r.beat, values, in_flight, now) or stuck_engine:
            return self._eject(values.replica_id, r, Sign.HUNG, now), restarted
        return [], restarted

    def wake(self, now: float) -> list[FleetEvent]:
        """Time passed. Without canaries a back-off that is over ends in half-open."""
        events: list[FleetEvent] = []
        if not self.settings.canary:
            for replica_id, r in self.records.items():
                lies = r.phase is Phase.OUT and r.canary and not r.asleep
                if lies and now >= r.until and r.failed_probes == 0:
                    events += self._return(replica_id, r, now)
        return events

    # -- rules -------------------------------------------------------------------------------------------------

    def _eject(self, replica_id: str, r: Record, sign: Sign, now: float) -> list[FleetEvent]:
        statistical = sign in SOFT
        if r.phase is Phase.STARTING:
            r.reason = sign.value
            return []
        if r.phase is Phase.OUT:
            if statistical or not r.statistical:
                r.canary |= sign not in TOLD_BY_PROBE
                return []
        elif statistical and not self._can_spare(r):
            return []
        else:
            self._back_off(r, now)
        r.phase, r.reason, r.statistical = Phase.OUT, sign.value, statistical
        r.canary = sign not in TOLD_BY_PROBE
        r.window.clear()
        return [Ejected(replica_id, sign.value, statistical), *self._calm(now)]

    def _back_off(self, r: Record, now: float) -> None:
        s = self.settings
        r.until = now + min(s.backoff_s * 2.0 ** min(r.ejections, 30), s.backoff_max_s)
        r.ejections += 1

    def _return(self, replica_id: str, r: Record, now: float) -> list[FleetEvent]:
        r.phase, r.reason, r.statistical, r.canary = Phase.HALF_OPEN, "", False, False
        r.failed_in_row = r.good_attempts = r.good_before = 0
        r.beat.stuck_scrapes = 0
        r.beat.engines = {}
        return [Returned(replica_id, half_open=True)]

    def _calm(self, now: float) -> list[FleetEvent]:
        """Panic mode: statistically ejected replicas come back while a model of theirs has too few others."""
        events: list[FleetEvent] = []
        out = [(r.until, replica_id, r) for replica_id, r in self.records.items() if r.statistical and not r.draining]
        for _, replica_id, r in sorted(out, key=lambda row: row[:2]):
            if any(there < self.settings.panic_share * total for there, total in self._rotation(r)):
                events += self._return(replica_id, r, now)
        return events

    def _can_spare(self, r: Record) -> bool:
        return all(there - 1 >= self.settings.panic_share * total for there, total in self._rotation(r))

    def _rotation(self, r: Record) -> Iterator[tuple[int, int]]:
        """(in rotation, all) of the replicas that do not drain, for each model that `r` serves."""
        for model in r.models or {""}:
            peers = [o for o in self.records.values() if not o.draining and (model in o.models or not o.models)]
            yield sum([o.in_rotation for o in peers], 0), len(peers)

    def _count(self, r: Record, failed: bool, now: float) -> None:
        width = self._bucket_s
        if not r.window or now - r.window[-1][0] >= width:
            r.window.append([now, 0, 0])
        r.window[-1][1] += 1
        r.window[-1][2] += failed

    def _too_many(self, r: Record, now: float) -> bool:
        s = self.settings
        if r.failed_in_row >= s.failures_in_row:
            return True
        recent = [b for b in r.window if now - b[0] < s.failure_window_s]
        attempts, failures = sum([b[1] for b in recent], 0.0), sum([b[2] for b in recent], 0.0)
        return attempts >= s.failure_min_attempts and failures >= s.failure_share * attempts

    def _restarted(self, beat: Beat, values: Scraped) -> bool:
        """A later process start, or a counter that fell; after a move, anything but the same process start."""
        steps = (values.iterations, values.generation_tokens)
        pairs = zip(steps, beat.steps, strict=True)
        fell = any(new is not None and old is not None and new < old for new, old in pairs)
        known = None not in (values.started_at, beat.started_at)
        later = known and values.started_at != beat.started_at
        unproven = beat.moved and not known
        beat.moved = False
        beat.started_at = values.started_at if values.started_at is not None else beat.started_at
        return fell or later or unproven

    def _stuck(self, beat: Beat, values: Scraped, in_flight: int, now: float) -> bool:
        """Requests in flight, and neither a step nor a token over three scrapes and `hang_s`."""
        steps = (values.iterations, values.generation_tokens)
        still = steps == beat.steps and steps != (None, None)
        beat.steps = steps
        if not still or in_flight < 1:
            beat.stuck_scrapes = 0
            return False
        beat.stuck_scrapes += 1
        if beat.stuck_scrapes == 1:
            beat.stuck_since = now
        return beat.stuck_scrapes >= STUCK_SCRAPES and now - beat.stuck_since >= self.settings.hang_s

    def _stuck_engine(self, beat: Beat, values: Scraped, now: float) -> bool:
        """One of several engines has requests and makes no step, while the others may: their sum hides it.

        Its gauge alone may be stale (after an abort an idle engine publishes nothing), so a silent stream is asked for.
        """
        engines: dict[str, tuple[float, int, float]] = {}
        for name, there, steps in values.engines:
            before, scrapes, since = beat.engines.get(name, (None, 0, now))
            still = there > 0 and steps == before
            engines[name] = (steps, scrapes + 1 if still else 0, since if still and scrapes else now)
        beat.engines = engines
        return any(n >= STUCK_SCRAPES and now - since >= self.settings.hang_s for _, n, since in engines.values())
