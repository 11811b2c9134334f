"""The shadow policies of one gateway: who is asked, and what their answers add up to in /metrics.

Wraps whatever policy acts, an experiment's too. Sums go on over changes of the acting policy; a shadow that leaves
the configuration takes its series along.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.experiment_table import Shadow
from policies import make
from policies.policy import RoutingPolicy
from policies.shadow import Shadowing, Tally


class Shadows(Collector):
    def __init__(self, table: Shadow) -> None:
        self.tallies: dict[str, Tally] = {}
        self.configure(table)

    def configure(self, table: Shadow) -> None:
        self.table = table
        self.tallies = {name: self.tallies.get(name, Tally()) for name in table.policies}

    def wrap(self, acting: RoutingPolicy) -> RoutingPolicy:
        """The policy that the core gets: `acting`, with its shadows where there are any."""
        acting = bare(acting)
        if not self.table.policies or self.table.share <= 0.0:
            return acting
        shadows = {name: make(name, None, random.Random(0)) for name in self.table.policies}
        return Shadowing(acting, shadows, self.table.share, self.tallies)

    def collect(self) -> Iterator[Metric]:
        asked = CounterMetricFamily("forebay_shadow_requests", "Requests that a shadow policy was asked about.",
                                    labels=("policy", "agrees"))  # fmt: skip
        tokens = CounterMetricFamily("forebay_shadow_uncached_tokens",
                                     "Uncached tokens it would have had fewer or more than the acting policy.",
                                     labels=("policy", "direction"))  # fmt: skip
        delay = CounterMetricFamily("forebay_shadow_delay_seconds",
                                    "Predicted time to first token it would have been sooner or later by.",
                                    labels=("policy", "direction"))  # fmt: skip
        for name, tally in self.tallies.items():
            asked.add_metric((name, "yes"), tally.agreed)
            asked.add_metric((name, "no"), tally.asked - tally.agreed)
            tokens.add_metric((name, "fewer"), tally.fewer_tokens)
            tokens.add_metric((name, "more"), tally.more_tokens)
            delay.add_metric((name, "sooner"), tally.sooner_s)
            delay.add_metric((name, "later"), tally.later_s)
        yield from (asked, tokens, delay)


def bare(policy: RoutingPolicy) -> RoutingPolicy:
    """The acting policy without its shadows."""
    return policy.acting if isinstance(policy, Shadowing) else policy
