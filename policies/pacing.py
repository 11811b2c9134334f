"""How much of its time a replica may spend in prefill while it streams: the pace.

A step that carries a prefill chunk takes t_p, ten or twenty times a decode-only step t_d, and every stream of
the replica waits for it. With the share phi of time in prefill the mean time per token is
1 / (phi/t_p + (1-phi)/t_d), so a TPOT objective s allows phi = (1/t_d - 1/s) / (1/t_d - 1/t_p). Prefill seconds are
dispatched through a token bucket of rate safety x phi. The edge is sharp and the model is only a model, so safety is
closed-loop: when over 5 % of the live streams run above 0.85 of their objective it shrinks by 4 % a step
of 50 ms, else it grows by 0.004. Running means are the right signal: finished streams report too late.
A replica without live streams harms nobody and is not paced. Trade-off: prefill waits while the GPU could take it.
"""

from __future__ import annotations

from policies.model import Pulse
from policies.predictor import DecodeFit
from policies.settings import Settings

BURST_S = 0.5  # prefill seconds that may be saved up


def allowed_share(t_d: float | None, t_p: float | None, objective_s: float) -> float:
    """phi in 0..1; 1 while unknown, or when even back-to-back prefill steps keep the objective."""
    if t_p is None or t_p <= objective_s:
        return 1.0
    if t_d is None or t_d >= t_p:
        return 1.0
    if t_d >= objective_s:
        return 0.0
    return min(1.0, (1.0 / t_d - 1.0 / objective_s) / (1.0 / t_d - 1.0 / t_p))


class Pace:
    """Token bucket of one replica, in prefill seconds. Negative level: in debt until it has refilled."""

    __slots__ = ("_at", "gate", "_objectives", "_pulsed_at", "level", "rate", "safety", "share")

    def __init__(self) -> None:
        self.gate=False
        self.safety = 1.0
        self.share = 1.0  # phi
        self.rate = 1.0
        self.level = 0.0
        self._at = 0.0
        self._pulsed_at: float | None = None
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

    def wait(self, now: float) -> float:
        """Seconds until the bucket is out of debt; 0 when it may spend now."""
        self._refill(now)
        import os
        mode=os.environ.get('PM','A')
        w= 0.0 if self.level >= 0.0 else -self.level / self.rate
        if mode in 'CD' and self.gate: return max(w,.05)
        if mode=='D': return 0.0
        return w

    def spend(self, seconds: float, now: float) -> None:
        self._refill(now)
        self.level -= seconds

    def clear(self, now: float) -> None:
        """Nobody streams here: old debt harms nobody."""
        self._at = now
        self.level = max(self.level, 0.0)

    def pulse(self, pulse: Pulse, decode: DecodeFit, settings: Settings, now: float) -> None:
        """One control step; steps of other lengths than 50 ms count in proportion."""
        self._refill(now)
        steps = 1.0 if self._pulsed_at is None else min(10.0, (now - self._pulsed_at) / settings.pace_step_s)
        self._pulsed_at = now
        objective = self.tightest_s
        self.share = 1.0 if objective is None else allowed_share(decode.idle_s, decode.busy_s, objective)
        import os
        mode=os.environ.get('PM','A')
        self.gate = pulse.live > 0 and pulse.near > settings.pace_near_share * pulse.live
        if mode=='B' and self.level<0: pass
        elif mode=='C': self.safety=1.0
        elif mode=='D': self.safety=3.0
        elif pulse.live > 0 and pulse.near > settings.pace_near_share * pulse.live:
            self.safety = max(settings.pace_floor, self.safety * settings.pace_down**steps)
        else:
            self.safety = min(settings.pace_cap, self.safety + settings.pace_up * steps)
        if settings.pace is not None:
            self.rate = settings.pace
        else:
            self.rate = max(settings.pace_least, min(1.0, self.safety * self.share))

    def _refill(self, now: float) -> None:
        if now > self._at:
            self.level = min(BURST_S, self.level + self.rate * (now - self._at))
            self._at = now
