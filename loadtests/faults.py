"""What can go wrong with a simulated replica, on command: the ways real ones were seen to fail.

crash      the engine dies: error event and [DONE] on open streams, 500 elsewhere, then the port refuses
kill       the process dies: open connections end with a plain FIN, then the port refuses
hang       no step ends any more; /health stays 200 and the gauges keep their last value
pause, sleep   requests wait; /health stays 200; sleep shows in engine_sleep_state
abort      stopped without drain: open answers end cleanly with finish reason `abort`, then the port refuses
drain      stopped with drain: what runs goes on, each new request is answered at once with nothing and `abort`
slow       steps take `factor` times as long
error, cut the stream fails after `after` tokens, with an error event or a plain FIN; `count` requests, then no more
refuse     the port refuses; what is open goes on
unhealthy  /health answers 503
restart    as a new process: empty cache, zero counters, no fault
clear      no fault
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = (
    "crash", "kill", "hang", "pause", "sleep", "abort", "drain", "slow", "error", "cut", "refuse", "unhealthy",
    "restart", "clear",
)  # fmt: skip


@dataclass(slots=True)
class Faults:
    """What is wrong with one replica now."""

    frozen: str | None = None  # hang, pause, sleep or dead
    draining: bool = False
    slow: float = 1.0
    unhealthy: bool = False
    strike_kind: str = "error"
    strike_tokens: int = 0
    strikes_left: int = 0

    def strike_after(self, length: int) -> int:
        """Token index at which the next answer fails; -1: it does not."""
        if not self.strikes_left:
            return -1
        self.strikes_left -= 1
        return min(self.strike_tokens, length - 1)


@dataclass(slots=True, frozen=True)
class Command:
    """A fault as it is ordered. `for_s` > 0 ends it by itself (clock seconds)."""

    kind: str
    factor: float = 3.0
    after: int = 5
    count: int = 1_000_000_000
    for_s: float = 0.0

    @classmethod
    def of(cls, values: dict[str, object]) -> Command:
        """Raises ValueError naming the field, its value and what would be right."""
        kind = values.get("kind")
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} must be one of {', '.join(KINDS)}")
        given: dict[str, float] = {}
        for name, value in values.items():
            if name == "kind":
                continue
            if name not in ("factor", "after", "count", "for_s"):
                raise ValueError(f"{name} is unknown; fields are kind, factor, after, count, for_s")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise ValueError(f"{name} is {value!r}; it must be a number of 0 or more")
            given[name] = value
        command = cls(str(kind), **given)  # type: ignore[arg-type]
        if command.factor <= 0:
            raise ValueError(f"factor {command.factor} must be above 0")
        return command
