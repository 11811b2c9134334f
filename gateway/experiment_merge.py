"""One experiment over several gateways: their counts added, and read as if one gateway had counted them all.

Keys are assigned alike everywhere, so a bucket or a block of time means the same in each. What differs between
gateways (other weights, another table) cannot be added and is named.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.trial import Trial
from policies.effects import Counts


def merged(trials: Sequence[Trial]) -> Trial:
    """The first trial with the counts of all. Raises ValueError saying what differs."""
    first = trials[0]
    for other in trials[1:]:
        if other.table != first.table:
            raise ValueError(f'the gateways run different tables of "{first.plan.name}" and "{other.plan.name}"')
        if other.plan.weights != first.plan.weights:
            raise ValueError(
                f"weights are {list(first.plan.weights)} on one gateway and {list(other.plan.weights)} on another; "
                "set the same with `forebay experiment weights`"
            )
    counts, strata = first.counts, dict(first.strata)
    for other in trials[1:]:
        counts = counts.merged(other.counts)
        for name, part in other.strata.items():
            strata[name] = strata.get(name, Counts.new()).merged(part)
    ended = [t.ended_unix for t in trials]
    return Trial(
        first.table,
        first.plan,
        counts,
        strata,
        why_stopped={name: why for t in trials for name, why in t.why_stopped.items()},
        ended_unix=None if None in ended else max(e for e in ended if e is not None),
        ended_why=first.ended_why,
        policies=first.policies,
        keyless=sum(t.keyless for t in trials),
        assigned=sum(t.assigned for t in trials),
    )
