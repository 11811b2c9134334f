"""What the streams of one replica do, over all hands: the meter of the core.

Each hand pulses for its own streams about every 50 ms. The pacing controller was measured with one pulse per replica
and 50 ms, so the hands' are added up here and told to it as one; gaps are sums, live and near are what each hand said
last, the least slack is the least of theirs. A hand that says nothing for a while, or died, counts no more.
"""

from __future__ import annotations

from gateway.pulses import Meter
from policies.model import Pulse, Scraped

FORGET_S = 0.5


class Gathered(Meter):
    __slots__ = ("_hands", "_said", "seen")

    def __init__(self, replica_id: str) -> None:
        super().__init__(replica_id)
        self._hands: dict[int, tuple[float, Pulse]] = {}  # hand: when it said what last
        self.seen = 0  # events of all hands, those of live streams included
        self._said = False

    @property
    def stirred(self) -> bool:
        return bool(self._said or self._hands)

    def heard(self, hand: int, events: int, pulse: Pulse, now: float) -> None:
        """One hand's pulse, its gaps already counted in tokens."""
        self.seen += events
        self.idle_gaps += pulse.idle_gaps
        self.idle_sum_s += pulse.idle_gap_sum_s
        self.busy_gaps += pulse.busy_gaps
        self.busy_sum_s += pulse.busy_gap_sum_s
        self._said = True
        if pulse.live:
            self._hands[hand] = (now, pulse)
        else:
            self._hands.pop(hand, None)

    def forget(self, hand: int) -> None:
        self._hands.pop(hand, None)

    def pulse(self, now: float) -> Pulse:
        hands = self._hands
        for hand in [h for h, (at, _) in hands.items() if now - at > FORGET_S]:
            del hands[hand]
        last = [pulse for _, pulse in hands.values()]
        slacks = [p.least_slack_s for p in last if p.least_slack_s is not None]
        made = Pulse(
            live=sum([p.live for p in last], 0),
            near=sum([p.near for p in last], 0),
            least_slack_s=min(slacks) if slacks else None,
            idle_gaps=self.idle_gaps,
            idle_gap_sum_s=self.idle_sum_s,
            busy_gaps=self.busy_gaps,
            busy_gap_sum_s=self.busy_sum_s,
        )
        self.idle_gaps = self.busy_gaps = 0
        self.idle_sum_s = self.busy_sum_s = 0.0
        self._said = False
        return made

    def scraped(self, values: Scraped) -> None:
        self.events_total = self.seen
        super().scraped(values)
