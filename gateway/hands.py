"""What is known of the single hands, beside the whole gateway: whether each keeps up, and how far away the core is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.distribution import Distribution
from gateway.hub import Hub
from gateway.remote import ANSWER_S

GAUGES = (
    ("open", "forebay_hand_open_requests", "Requests of one worker that are received and not finished."),
    ("lag_s", "forebay_hand_loop_lag_seconds", "How late a worker's event loop runs its timers, running mean."),
    ("lag_max_s", "forebay_hand_loop_lag_max_seconds", "The same, worst of the last second."),
    ("draining", "forebay_hand_draining", "1 while the worker shuts down."),
)


class HandSeries(Collector):
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        hands = [hand for hand in self._hub.hands if hand.state]
        for key, name, help_text in GAUGES:
            family = GaugeMetricFamily(name, help_text, labels=("hand",))
            for hand in hands:
                family.add_metric([str(hand.slot)], float(hand.state[key]))
            yield family
        local = CounterMetricFamily(
            "forebay_hand_fallback_decisions", "Requests a worker placed while no core answered.", labels=("hand",)
        )
        answers = HistogramMetricFamily(
            "forebay_hand_decision_seconds", "From asking the core for a decision to its answer.", labels=("hand",)
        )
        for hand in hands:
            local.add_metric([str(hand.slot)], float(hand.state["local"]))
            told = Distribution(ANSWER_S)
            told.counts, told.total = hand.state["answers"]
            answers.add_metric([str(hand.slot)], told.cumulative(), told.total)
        yield local
        yield answers
        yield CounterMetricFamily(
            "forebay_hands_lost", "Workers that went with open requests.", value=self._hub.lost_hands
        )


def mount(app: FastAPI, hub: Hub) -> None:
    @app.get("/admin/workers")
    async def workers() -> dict[str, Any]:
        """The processes of this gateway: the core, with how long ago the hands were told what it has learnt (with which
        a core that follows it goes on), and each hand with what it said of itself last."""
        hands = [
            {"slot": hand.slot, "pid": hand.pid, "open_at_core": len(hand.open), "state": hand.state}
            for hand in sorted(hub.hands, key=lambda hand: hand.slot)
            if hand.greeted
        ]
        taught_s = None if hub.taught_at is None else time.monotonic() - hub.taught_at
        return {"core": {"pid": os.getpid(), "taught_s_ago": taught_s}, "hands": hands}
