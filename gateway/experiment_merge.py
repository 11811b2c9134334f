"""One experiment over several gateways: their counts added, and read as if one gateway had counted them all.

Keys are assigned alike everywhere, so a bucket or a block of time means the same in each. What differs between
gateways (other weights, another table) cannot be added and is named.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.trial import Phase, Trial
from policies.effects import Counts


def merged(trials: Sequence[Trial]) -> Trial:
    """The first trial with the counts of all. Raises ValueError saying what differs."""
    first = trials[0]
    if len(trials) == 1:
        return first
    for other in trials[1:]:
        if other.table != first.table:
            raise ValueError(f'the gateways run different tables of "{first.plan.name}" and "{other.plan.name}"')
        if other.plan.weights != first.plan.weights:
            raise ValueError(
                f"weights are {list(first.plan.weights)} on one gateway and {list(other.plan.weights)} on another; "
                "set the same with `forebay experiment weights`"
            )
    counts, guard, strata = first.counts, first.guard, dict(first.strata)
    told = all(t.id == first.id for t in trials)  # weighed by one for all, so at one instant
    phases = {(p.weights, p.until_unix): p.counts for p in first.phases if told}
    for other in trials[1:]:
        counts, guard = counts.merged(other.counts), guard.merged(other.guard)
        for name, part in other.strata.items():
            strata[name] = strata.get(name, Counts.new()).merged(part)
        for p in other.phases:
            if (p.weights, p.until_unix) in phases:
                phases[p.weights, p.until_unix] = phases[p.weights, p.until_unix].merged(p.counts)
    ended = [t.ended_unix for t in trials]
    return Trial(
        first.table,
        first.plan,
        counts,
        strata,
        guard,
        [Phase(weights, until, kept) for (weights, until), kept in phases.items()],
        why_stopped={name: why for t in trials for name, why in t.why_stopped.items()},
        ended_unix=None if None in ended else max(e for e in ended if e is not None),
        ended_why=first.ended_why,
        policies=first.policies,
        keyless=sum(t.keyless for t in trials),
        assigned=sum(t.assigned for t in trials),
        id=first.id,
        ledger=first.ledger,
        weighed_unix=first.weighed_unix,
        overdue=first.overdue,
    )
