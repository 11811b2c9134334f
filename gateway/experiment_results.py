"""What an experiment says so far, as plain values for the admin API, the live page and the command line.

Every interval may be looked at any time (`policies/sequences.py`). `difference` is arm minus control as the design
tells it: for all traffic where it can be told, else beside the other arm; `scope` says which. Intervals of strata are
each true alone, not all at once. Goodput is attainment times the rate that was offered to all arms together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.trial import Trial
from policies import effects
from policies.clusters import ERRORS, GOOD, PACE, PACED, REQUESTS, Contrast, contrast
from policies.designs import Design, Plan
from policies.effects import Counts
from policies.sequences import anytime, planned_information
from policies.statistics import Interval

SCOPES = {
    True: "all traffic on this arm against all on the control",
    False: "beside the other arms on one fleet: caches and queues are shared, so a full switch may do more or less",
}
CAVEATS = {
    Design.SPLIT: "arms share caches and queues; set swing above 0, or use partition or switchback, to see past that",
    Design.PARTITION: "each arm has a part of the fleet; a whole fleet pools more and may differ by less or more",
    Design.SWITCHBACK: "arms take turns; what outlasts the wash of a slice falls to the next arm (see carry_over)",
}


def results(trial: Trial, now_unix: float) -> dict[str, Any]:
    """The whole document of `GET /admin/experiment`."""
    plan, counts = trial.plan, trial.counts
    until = trial.ended_unix or now_unix
    planned = planned_information(trial.table.smallest)
    elapsed = max(1e-9, until - max(plan.started_unix, plan.counts_from()))
    offered = sum(_requests(plan, counts, arm) for arm in range(len(plan.arms)))
    share = 1.0 - (plan.wash_s / plan.slice_s if plan.design is not Design.SPLIT or plan.swings else 0.0)
    rate = offered / (elapsed * share) if offered else 0.0
    told = [_told(plan, counts, arm, planned) for arm in range(len(plan.arms))]
    notes = [CAVEATS[plan.design]] if not plan.swings else []
    if trial.assigned and trial.keyless:
        notes.append(
            f"{trial.keyless / trial.assigned:.0%} of requests have no {trial.table.key}: they are assigned one by one"
        )
    if all(arm.policy == trial.table.arms[0].policy and not arm.core for arm in trial.table.arms[1:]) and (
        len({str(arm.settings) for arm in trial.table.arms}) == 1
    ):
        notes.append("A/A: the arms are the same, so every difference here is noise")
    if trial.running and until < plan.probation_until:
        notes.append("on probation: guard rails look, shares do not swing and turns are short; nothing is counted yet")
    if trial.running and until < plan.counts_from():
        notes.append(f"counting begins in {plan.counts_from() - until:.0f} s, with the next whole block of slices")
    if trial.phases:
        notes.append(f"weights changed {len(trial.phases)} times; what is shown was counted since the last change")
    return {
        "name": plan.name,
        "state": "running" if trial.running else "ended",
        "ended_why": trial.ended_why,
        "design": plan.design.value,
        "key": trial.table.key,
        "seed": plan.seed,
        "started_unix": plan.started_unix,
        "ended_unix": trial.ended_unix,
        "elapsed_s": round(until - plan.started_unix, 1),
        "smallest": trial.table.smallest,
        "offered_rps": round(rate, 4),
        "scope": SCOPES[plan.swings or plan.design is not Design.SPLIT],
        "slice": _slice(plan, now_unix) if trial.running else None,
        "arms": [
            {
                "name": name,
                "control": arm == 0,
                "policy": trial.policies.get(name) or trial.table.arms[arm].policy or "own",
                "core": trial.table.arms[arm].core,
                "weight": plan.weights[arm],
                "state": _state(trial, arm),
                "stopped_why": trial.why_stopped.get(name, ""),
                "watched": _watched(trial, arm),
                "goodput_rps": None if told[arm]["attainment"] is None else round(rate * told[arm]["attainment"], 4),
                "goodput_interval": [round(rate * x, 4) for x in told[arm]["attainment_interval"] or ()] or None,
                **told[arm],
            }
            for arm, name in enumerate(plan.arms)
        ],
        "interference": _interval(effects.interference(plan, counts), planned),
        "strata": {
            name: [
                {"name": plan.arms[arm], **_told(plan, part, arm, planned, brief=True)} for arm in range(len(plan.arms))
            ]
            for name, part in sorted(trial.strata.items())
        },
        "phases": [
            {
                "weights": list(p.weights),
                "until_unix": p.until_unix,
                "arms": [
                    {"name": plan.arms[a], **_told(plan, p.counts, a, planned, brief=True)}
                    for a in range(len(plan.arms))
                ],
            }
            for p in trial.phases
        ],
        "notes": notes,
    }


def _told(plan: Plan, counts: Counts, arm: int, planned: float, brief: bool = False) -> dict[str, Any]:
    requests = _requests(plan, counts, arm)
    good, errors = (_total(plan, counts, arm, column) for column in (GOOD, ERRORS))
    paced = _total(plan, counts, arm, PACED)
    own = None if not requests else _rate(plan, counts, arm)
    found = effects.effect(plan, counts, arm) if arm else None
    told: dict[str, Any] = {
        "requests": int(requests),
        "good": int(good),
        "attainment": None if not requests else round(good / requests, 6),
        "attainment_interval": _bounds(_clip(anytime(own, planned))),
        "difference": _interval(found, planned) if arm else None,
    }
    if brief:
        return told
    told |= {
        "errors": int(errors),
        "pace": None if not paced else round(_total(plan, counts, arm, PACE) / paced, 4),
        "direct_difference": _interval(effects.direct(plan, counts, arm), planned) if arm else None,
        "error_difference": _interval(effects.effect(plan, counts, arm, ERRORS), planned) if arm else None,
        "pace_difference": _interval(effects.effect(plan, counts, arm, PACE, PACED), planned) if arm else None,
        "carry_over": _interval(effects.carry_over(plan, counts, arm), planned),
    }
    return told


def _watched(trial: Trial, arm: int) -> dict[str, Any]:
    """What guard rails saw of an arm, requests on probation and those that are late already among them."""
    seen = trial.watched()
    requests, good, errors = (seen.total(arm, column) for column in (REQUESTS, GOOD, ERRORS))
    return {
        "requests": int(requests),
        "attainment": None if not requests else round(good / requests, 6),
        "errors": int(errors),
    }


def _rate(plan: Plan, counts: Counts, arm: int) -> Contrast | None:
    table = counts.buckets if plan.design is Design.SPLIT else counts.blocks.without_levels()
    return contrast(table, {(arm, 0): 1.0})


def _requests(plan: Plan, counts: Counts, arm: int) -> float:
    return _total(plan, counts, arm, REQUESTS)


def _total(plan: Plan, counts: Counts, arm: int, column: int) -> float:
    return (counts.buckets if plan.design is Design.SPLIT else counts.blocks).total(arm, column)


def _interval(found: Contrast | None, planned: float) -> dict[str, Any] | None:
    """An estimate with its bounds (null until there are enough units), in shares."""
    if found is None:
        return None
    made = anytime(found, planned)
    bounds = _bounds(made)
    return {
        "estimate": round(found.estimate, 6),
        "low": None if bounds is None else bounds[0],
        "high": None if bounds is None else bounds[1],
        "units": found.clusters,
        "variance_reduced": round(found.reduced, 4),
        "excludes_zero": made is not None and made.excludes_zero,
    }


def _bounds(made: Interval | None) -> list[float] | None:
    return None if made is None else [round(made.low, 6), round(made.high, 6)]


def _clip(made: Interval | None) -> Interval | None:
    if made is None:
        return None
    low, high = max(0.0, made.low), min(1.0, made.high)
    return Interval(made.estimate, low, high, made.n, made.method, made.level)


def _state(trial: Trial, arm: int) -> str:
    if arm in trial.plan.stopped:
        return "stopped"
    return "running" if trial.running else "ended"


def _slice(plan: Plan, unix: float) -> dict[str, Any] | None:
    if plan.design is Design.SPLIT and not plan.swings:
        return None
    moment = plan.moment(unix)
    told: dict[str, Any] = {"left_s": round(moment.left_s, 1), "washing": moment.since_s < plan.wash_s}
    namer: Callable[[int], str] = plan.arms.__getitem__
    if plan.design is Design.SWITCHBACK:
        told["arm"] = namer(plan.active(unix))
    elif plan.design is Design.PARTITION:
        told["arm_of_group"] = [namer(plan.arm_of_group(g, unix)) for g in range(len(plan.arms))]
    else:
        turn = plan.order(moment.block)[moment.position]
        shares = plan.weights if unix < plan.probation_until else plan.shares(turn)
        shares = tuple(share / sum(shares) for share in shares)
        told["shares"] = {name: round(s, 4) for name, s in zip(plan.arms, shares, strict=True)}
    return told
