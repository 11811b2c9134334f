"""When a replica that streams may begin another prefill: the pace.

A step that carries a prefill chunk takes t_p, ten or twenty times a decode-only step t_d, and every stream of the
replica waits for it. With the share phi of time in prefill the mean time per token is
1 / (phi/t_p + (1-phi)/t_d), so a TPOT objective s allows phi = (1/t_d - 1/s) / (1/t_d - 1/t_p). A bucket of that rate
needs the right rate, and one prompt of 70k tokens puts it in debt for longer than the streams need to recover. The
streams' own running means are all the state there is, so the pace is a relay on them: no new prefill while over
5 % of the live streams run above 0.85 of their objective, go as soon as they are back. A trickle of `pace_trickle`
keeps a replica usable whose streams can never meet theirs; phi only estimates capacity.
Without live streams, or where prefill does not stretch the steps, nobody is harmed and nothing paced.
`Settings.pace` sets a fixed-rate bucket instead.
"""

from __future__ import annotations

from typing import Final

from policies.model import Pulse
from policies.predictor import DecodeFit
from policies.settings import Settings

BURST_S: Final = 0.5  # prefill seconds that a fixed rate may save up
STALE_S: Final = 1.0  # without a pulse for this long the relay opens: it knows nothing
PULSE_S: Final = 0.05
STRETCH: Final = 1.2  # times a decode-only step, from which a step with prefill counts as longer


def allowed_share(t_d: float | None, t_p: float | None, objective_s: float) -> float:
    """phi in 0..1; 1 while unknown, or when even back-to-back prefill steps keep the objective."""
    if t_p is None or t_p <= objective_s:
        return 1.0
    if t_d is None or t_d >= t_p:
        return 1.0
    if t_d >= objective_s:
        return 0.0
    return min(1.0, (1.0 / t_d - 1.0 / objective_s) / (1.0 / t_d - 1.0 / t_p))


def stretches(decode: DecodeFit) -> bool:
    """Whether steps with prefill are longer than those without, so that waiting would help the streams; True while
    unknown. Where they are not, the engine is slow for another reason or the prompts are short."""
    return decode.idle_s is None or decode.busy_s is None or decode.busy_s > STRETCH * decode.idle_s


class Pace:
    """Relay of one replica, with the bucket of its trickle or of a fixed rate (prefill seconds; below 0: in debt)."""

    __slots__ = (
        "_at",
        "_fill",
        "_objectives",
        "_pulsed_at",
        "closed",
        "closed_share",
        "fixed",
        "level",
        "rate",
        "slack_s",
        "spent_s",
    )

    def __init__(self) -> None:
        self.closed = False  # the relay: streams need to recover
        self.closed_share = 0.0  # of recent time, for metrics
        self.slack_s: float | None = None  # least TPOT slack of its streams
        self.rate = 1.0  # prefill seconds per second it is believed to take: phi
        self.level = 0.0
        self.spent_s = 0.0  # prefill seconds sent by us since the start
        self._at = 0.0
        self._fill = 1.0
        self.fixed = False  # a bucket of a fixed rate instead of the relay
        self._pulsed_at = float("-inf")
        self._objectives: dict[float, int] = {}  # TPOT objectives of its open streams

    def enter(self, tpot_s: float | None) -> None:
        if tpot_s is not None:
            self._objectives[tpot_s] = self._objectives.get(tpot_s, 0) + 1

    def leave(self, tpot_s: float | None) -> None:
        if tpot_s is None:
            return
        left = self._objectives.get(tpot_s, 0) - 1
        if left > 0:
            self._objectives[tpot_s] = left
        else:
            self._objectives.pop(tpot_s, None)

    @property
    def tightest_s(self) -> float | None:
        return min(self._objectives) if self._objectives else None

    def spare(self, share: float) -> bool:
        """Whether even the slowest stream keeps this share of the tightest objective as slack."""
        tightest = self.tightest_s
        return not self.closed and (self.slack_s is None or tightest is None or self.slack_s >= share * tightest)

    def wait(self, now: float) -> float:
        """Seconds until it may spend, as far as can be told; 0 when it may now. Ask only while streams are live."""
        if self.fixed:
            self._refill(now)
            return 0.0 if self.level >= 0.0 else -self.level / self._fill
        if not self.closed or now - self._pulsed_at > STALE_S:
            return 0.0
        self._refill(now)
        return 0.0 if self.level >= 0.0 else PULSE_S

    def spend(self, seconds: float, now: float) -> None:
        self.spent_s += seconds
        self._charge(seconds, now)

    def spent_elsewhere(self, seconds: float, now: float) -> None:
        """Other gateways sent prefill there: one debt for all, or each would send its own while streams recover."""
        if seconds:
            self._charge(seconds, now)

    def _charge(self, seconds: float, now: float) -> None:
        if self.fixed or self.closed:
            self._refill(now)
            self.level -= seconds
        else:
            self.level, self._at = -seconds, now  # an open relay forgives what was spent before

    def clear(self, now: float) -> None:
        """Nobody streams here: old debt harms nobody."""
        self._at = now
        self.level = max(self.level, 0.0)

    def pulse(self, pulse: Pulse, decode: DecodeFit, settings: Settings, now: float) -> None:
        self._refill(now)
        self._pulsed_at = now
        self.fixed = settings.pace is not None
        self._fill = settings.pace_trickle if settings.pace is None else settings.pace
        self.slack_s = pulse.least_slack_s
        harmful = stretches(decode)
        self.closed = harmful and pulse.live > 0 and pulse.near > settings.pace_near_share * pulse.live
        self.closed_share += 0.005 * (self.closed - self.closed_share)
        objective = self.tightest_s
        share = 1.0 if objective is None or not harmful else allowed_share(decode.idle_s, decode.busy_s, objective)
        self.rate = max(settings.pace_trickle, share) if settings.pace is None else settings.pace

    def _refill(self, now: float) -> None:
        if now > self._at:
            self.level = min(BURST_S, self.level + self._fill * (now - self._at))
            self._at = now
