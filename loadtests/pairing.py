"""Arm against arm over the same blocks: what was gained, with an interval, or why the question is refused.

A block is one seed of the schedule; in it every arm got the same rows, bytes and start state. The unit of resampling
is the block, never the request. Runs whose schedule, window, drain or set-up differ are not compared; a block with an
invalid run on either side is left out of both and named. A claim needs at least 5 blocks, an interval without zero
and an effect above the noise floor, the largest difference that two runs of one arm showed. Otherwise it reads "no
difference shown". Percentiles are never averaged; row level is a second view, counted by block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from loadtests.record import Record
from loadtests.results import bucket
from policies.objectives import Partition
from policies.statistics import Interval, noise_floor, paired

LEAST_BLOCKS = 5
AGAIN = " (again)"  # the second run of the baseline in an A/A pair

Run = Mapping[str, Any]


class RefusedError(ValueError):
    """Runs that must not be compared; the text names what differs."""


def compare_all(runs: Sequence[Run], baseline: str | None = None) -> list[dict[str, Any]]:
    """Every arm against the baseline (default: the first arm) at every load. Raises RefusedError."""
    if not runs:
        raise RefusedError("no runs to compare")
    first = baseline or str(runs[0]["policy"])
    arms = list(dict.fromkeys(str(run["policy"]) for run in runs))
    if first not in arms:
        raise RefusedError(f"baseline {first!r} is not among the arms: {', '.join(arms)}")
    loads = sorted({float(run["load"]) for run in runs})
    out = []
    for load in loads:
        floor = _floor(runs, first, load)
        out += [compare(runs, first, arm, load, floor) for arm in arms if arm not in (first, first + AGAIN)]
    return out


def compare(runs: Sequence[Run], a: str, b: str, load: float, floor: float | None = None) -> dict[str, Any]:
    """B against A at one load, over the seeds that both ran. Raises RefusedError where they are not alike."""
    left, right = _by_seed(runs, a, load), _by_seed(runs, b, load)
    seeds = sorted(left.keys() & right.keys())
    if not seeds:
        raise RefusedError(f"{a} and {b} have no seed in common at load {load:g}")
    for seed in seeds:
        check_alike(left[seed], right[seed])
    valid = [s for s in seeds if left[s]["verdict"] == right[s]["verdict"] == "valid"]
    out: dict[str, Any] = {
        "a": a, "b": b, "load": load, "blocks": valid,
        "left_out": {"invalid": [s for s in seeds if s not in valid],
                     "one_side_only": sorted(left.keys() ^ right.keys())},
        "noise_floor_rps": floor,
    }  # fmt: skip
    if not valid:
        return out | {"statement": f"{b} against {a}: no valid block"}
    found = paired([left[s]["goodput_rps"] for s in valid], [right[s]["goodput_rps"] for s in valid])
    shares = paired([left[s]["attainment"] for s in valid], [right[s]["attainment"] for s in valid])
    out |= {
        "goodput_rps": _interval(found.difference),
        "goodput_rps_student": _interval(found.student),
        "goodput_ratio": list(found.ratio) if found.ratio else None,
        "attainment": _interval(shares.difference),
        "per_block": [
            {"seed": s, "a": left[s]["goodput_rps"], "b": right[s]["goodput_rps"]} for s in valid
        ],
        "by_class": _parts(left, right, valid, "by_class"),
        "by_bucket": _parts(left, right, valid, "by_bucket"),
        "statement": statement(a, b, found.difference, found.ratio, floor),
    }  # fmt: skip
    return out


def statement(
    a: str, b: str, difference: Interval, ratio: tuple[float, float, float] | None, floor: float | None
) -> str:
    """One sentence for people; claims nothing that the blocks do not carry."""
    if difference.n < 2:
        return f"{b} against {a}: {difference.estimate:+.3f}/s in one block; no interval, no claim"
    shown = f"{difference.estimate:+.3f}/s [{difference.low:+.3f}, {difference.high:+.3f}] over {difference.n} blocks"
    if ratio is not None:
        shown += f", {ratio[0]:.2f} times [{ratio[1]:.2f}, {ratio[2]:.2f}]"
    if difference.n < LEAST_BLOCKS:
        return f"{b} against {a}: {shown}; fewer than {LEAST_BLOCKS} blocks, no claim"
    if not difference.excludes_zero:
        return f"{b} against {a}: no difference shown ({shown})"
    if floor is not None and abs(difference.estimate) <= floor:
        return f"{b} against {a}: no difference shown ({shown}, within the noise of {floor:.3f}/s)"
    return f"{b} {'better' if difference.estimate > 0 else 'worse'} than {a}: {shown}"


def check_alike(one: Run, other: Run) -> None:
    """Raises RefusedError naming the first thing that differs between two runs of a block."""
    for name, what in (
        ("schedule_sha256", "schedule and objectives"), ("window_s", "window"), ("drain_s", "drain"),
        ("view", "view"), ("time_scale", "time scale"), ("setup", "set-up"),
    ):  # fmt: skip
        if one.get(name) != other.get(name):
            raise RefusedError(
                f"{one['policy']} and {other['policy']} at seed {one['seed']} differ in {what}: "
                f"{one.get(name)!r} against {other.get(name)!r}"
            )


def discordant(
    a: Iterable[tuple[int, Sequence[Record]]], b: Iterable[tuple[int, Sequence[Record]]]
) -> dict[str, dict[str, int]]:
    """Rows good under one arm only, by prompt-length bucket, from (seed, records) of each arm."""
    right = {(seed, r.id): r for seed, records in b for r in records}
    out: dict[str, dict[str, int]] = defaultdict(lambda: {"both": 0, "only_a": 0, "only_b": 0, "neither": 0})
    for seed, records in a:
        for record in records:
            other = right.get((seed, record.id))
            if other is None or not record.counted:
                continue
            good = (record.partition is Partition.GOOD, other.partition is Partition.GOOD)
            names = {(True, True): "both", (True, False): "only_a", (False, True): "only_b", (False, False): "neither"}
            out[bucket(record.prompt_tokens)][names[good]] += 1
    return dict(out)


def order(arms: Sequence[str], block: int) -> list[str]:
    """Arms in the order of one block: rows of a balanced Latin square (Williams 1949), ABBA for two.

    Over 2k blocks each arm stands at each place equally often and follows each other arm equally often.
    """
    k = len(arms)
    sequence, low, high = [0], 1, k - 1
    while len(sequence) < k:
        sequence.append(low)
        low += 1
        if len(sequence) < k:
            sequence.append(high)
            high -= 1
    row = [arms[(place + block) % k] for place in sequence]
    return row[::-1] if k % 2 and block % (2 * k) >= k else row


def _floor(runs: Sequence[Run], arm: str, load: float) -> float | None:
    first, second = _by_seed(runs, arm, load), _by_seed(runs, arm + AGAIN, load)
    both = [s for s in first if s in second and first[s]["verdict"] == second[s]["verdict"] == "valid"]
    if not both:
        return None
    return noise_floor([first[s]["goodput_rps"] for s in both], [second[s]["goodput_rps"] for s in both])


def _by_seed(runs: Sequence[Run], policy: str, load: float) -> dict[int, Run]:
    found: dict[int, Run] = {}
    for run in runs:
        if run["policy"] == policy and float(run["load"]) == load:
            if run["seed"] in found:
                raise RefusedError(f"{policy} ran seed {run['seed']} at load {load:g} twice; one run each")
            found[run["seed"]] = run
    return found


def _parts(left: Mapping[int, Run], right: Mapping[int, Run], seeds: Sequence[int], key: str) -> dict[str, Any]:
    """Difference in attainment of each part, over the blocks where it has rows."""
    out: dict[str, Any] = {}
    for name in dict.fromkeys(n for s in seeds for n in left[s][key]):
        held = [s for s in seeds if name in left[s][key] and name in right[s][key]]
        if held:
            pair = paired(
                [left[s][key][name]["attainment"] for s in held], [right[s][key][name]["attainment"] for s in held]
            )
            out[name] = _interval(pair.difference) | {"offered": sum(left[s][key][name]["offered"] for s in held)}
    return out


def _interval(interval: Interval) -> dict[str, Any]:
    return asdict(interval)
