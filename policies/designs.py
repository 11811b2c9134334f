"""How an experiment divides traffic: three designs, each a pure function of key, seed and wall time.

split: keys hash to arms over one fleet. Caches and queues are shared, so arms interfere; in alternate slices the shares
swing to both sides of their weights, and what an arm does as its share grows shows by how much (randomised
saturation: Hudgens and Halloran 2008; Baird et al. 2018). partition: keys hash to disjoint replica groups and keep
them; which arm runs a group rotates by slices, so unequal groups cancel. switchback: one arm at a time for everyone,
in slices whose order is drawn anew in each block (Bojinov, Simchi-Levi and Zhao 2023); the wash of each slice is not
counted. Slices count from the epoch, so gateways with one clock agree. An experiment begins on probation, which is not
counted: arms that take turns do so every few seconds and shares do not swing, so that a guard rail soon sees enough of
both. Trade-off: the less arms interfere, the fewer units are independent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import floor

from policies.assignment import bucket, hashed, order, pick, unit

PROBATION_SLICE_S = 5.0  # of a switchback on probation
MOST_WEIGHT = 1e6  # of an arm: sums of weights stay finite, and slices of time longer than nothing


class Design(StrEnum):
    SPLIT = "split"
    PARTITION = "partition"
    SWITCHBACK = "switchback"


@dataclass(slots=True)
class Assignment:
    """Where one request stands in the experiment. Cells (arm, level) are what estimates are made of. One is made for
    each request, so it is not frozen; nobody changes it."""

    arm: int
    level: int  # split: 0 the control's share is high, 1 low; partition: the group; switchback: 1 after another arm
    block: int  # block of slices, the unit of partition, switchback and a swinging split
    bucket: int  # hash bucket of the key, the unit of a split
    group: int | None  # replica group, of a partition
    counted: bool  # not during a wash, before the first whole block, or for keys that lost their arm


@dataclass(slots=True, frozen=True)
class Moment:
    """One instant in the schedule of slices."""

    block: int
    position: int  # slice within the block
    since_s: float  # since the slice began
    left_s: float  # until it ends


@dataclass(slots=True, frozen=True)
class Plan:
    """An experiment that runs; the first arm is the control. Times in unix seconds."""

    name: str
    design: Design
    arms: tuple[str, ...]
    weights: tuple[float, ...]
    seed: int
    started_unix: float
    slice_s: float = 120.0
    wash_s: float = 20.0
    swing: float = 0.8  # split of two arms: share of the room that the control's share moves to both sides; 0: fixed
    stopped: frozenset[int] = frozenset()  # arms whose traffic went back to the control
    moved_unix: float = 0.0  # weights changed or an arm stopped: counted again from the next whole block
    probation_s: float = 0.0  # since the start: guard rails look, nothing is counted

    @property
    def swings(self) -> bool:
        return self.design is Design.SPLIT and self.swing > 0.0 and len(self.arms) == 2

    @property
    def slices(self) -> int:
        """Slices of one block."""
        return 2 if self.design is Design.SPLIT else len(self.arms)

    def salts(self) -> tuple[int, ...]:
        return tuple(hashed(f"arm:{self.name}:{arm}", self.seed) for arm in self.arms)

    @property
    def probation_until(self) -> float:
        """Nothing is on probation that neither takes turns nor swings."""
        return self.started_unix + self.probation_s if self.design is Design.SWITCHBACK or self.swings else 0.0

    def moment(self, unix: float) -> Moment:
        """The slice at a time. Slices of a switchback are as long as their arm's weight says."""
        until = self.probation_until
        if self.started_unix <= unix < until and self.design is Design.SWITCHBACK:
            found = self._moment(unix, min(PROBATION_SLICE_S, self.slice_s))
            return replace(found, left_s=min(found.left_s, until - unix))
        found = self._moment(unix, self.slice_s)
        return replace(found, left_s=until - unix) if self.started_unix <= unix < until < unix + found.left_s else found

    def _moment(self, unix: float, slice_s: float) -> Moment:
        length = slice_s * self.slices
        block = floor(unix / length)
        into = unix - block * length
        total = sum(self.weights)
        begin, position = 0.0, 0
        for position, which in enumerate(self.order(block)):  # noqa: B007
            share = self.weights[which] / total if self.design is Design.SWITCHBACK else 1.0 / self.slices
            if into < begin + share * length:
                break
            begin += share * length
        return Moment(block, position, into - begin, begin + share * length - into)

    def order(self, block: int) -> list[int]:
        return order(self.seed, block, self.slices)

    def active(self, unix: float) -> int:
        """The arm that a switchback runs now; a stopped one is replaced by the control."""
        moment = self.moment(unix)
        return self.standing(self.order(moment.block)[moment.position])

    def groups(self, replicas: list[str]) -> list[list[str]]:
        """Disjoint groups of matched size, one an arm, dealt in an order hashed from seed and replica: a replica that
        comes or goes moves few others. Uneven numbers leave the last ones with one replica less."""
        ranked = sorted(replicas, key=lambda name: hashed(f"replica:{name}", self.seed))
        n = len(self.arms)
        return [ranked[i::n] for i in range(n)]

    def arm_of_group(self, group: int, unix: float) -> int:
        """Which arm runs a group now: a cyclic shift, so that each block puts each arm on each group once."""
        moment = self.moment(unix)
        shift = self.order(moment.block)[moment.position]
        return self.standing((group + shift) % len(self.arms))

    def shares(self, level: int) -> tuple[float, ...]:
        """Weights of a split in slices of this level."""
        if not self.swings:
            return self.weights
        control = self.weights[0] / sum(self.weights)
        moved = self.swing * min(control, 1.0 - control) * (1 if level == 0 else -1)
        return (control + moved, 1.0 - control - moved)

    def counts_from(self) -> float:
        """When counting begins: with the first whole block after start and after the last change."""
        if self.design is Design.SPLIT and not self.swings:
            return max(self.started_unix, self.moved_unix) + self.wash_s
        length = self.slice_s * self.slices
        return -floor(-max(self.started_unix, self.moved_unix, self.probation_until) / length) * length

    def standing(self, arm: int) -> int:
        return 0 if arm in self.stopped else arm


@dataclass(slots=True, frozen=True)
class _Slice:
    """What all requests of one slice have in common."""

    begin: float
    end: float
    block: int
    turn: int  # what the order of the block says of this slice
    changed: bool  # another arm ran before (switchback)
    shares: tuple[float, ...]
    counts_from: float


class Assigner:
    """A plan with its hashes and its present slice made ready. `assign` costs a few microseconds on the hot path."""

    __slots__ = ("_from", "_now", "_salts", "plan")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._salts = plan.salts()
        self._from = plan.counts_from()
        self._now = self._slice(plan.started_unix)

    def assign(self, key: str, unix: float) -> Assignment:
        plan, now = self.plan, self._now
        if not now.begin <= unix < now.end:
            now = self._now = self._slice(unix)
        name = hashed(key, plan.seed)
        counted = unix >= now.counts_from
        if plan.design is Design.SPLIT:
            wanted = pick(name, self._salts, now.shares)
            arm = plan.standing(wanted)
            level = now.turn if plan.swings else 0
            return Assignment(arm, level, now.block, bucket(name), None, counted and arm == wanted)
        if plan.design is Design.PARTITION:
            n = len(plan.arms)
            group = int(unit(name) * n)
            wanted = (group + now.turn) % n
            arm = plan.standing(wanted)
            return Assignment(arm, group, now.block, bucket(name), group, counted and arm == wanted)
        arm = plan.standing(now.turn)
        return Assignment(arm, int(now.changed), now.block, bucket(name), None, counted and arm == now.turn)

    def _slice(self, unix: float) -> _Slice:
        plan = self.plan
        moment = plan.moment(unix)
        turns = plan.order(moment.block)
        turn = turns[moment.position]
        begin = unix - moment.since_s
        earlier = plan.moment(begin - 1e-3)
        before = plan.order(earlier.block)[earlier.position]
        washes = plan.design is not Design.SPLIT or plan.swings
        return _Slice(
            begin,
            unix + moment.left_s,
            moment.block,
            turn,
            plan.standing(before) != plan.standing(turn),
            plan.weights if unix < plan.probation_until else plan.shares(turn),
            max(self._from, begin + plan.wash_s) if washes else self._from,
        )


def without(plan: Plan, arm: int, unix: float) -> Plan:
    """The same experiment with an arm's traffic back at the control. Raises ValueError for the control itself."""
    if not 0 < arm < len(plan.arms):
        raise ValueError(f"arm {arm}: 1 to {len(plan.arms) - 1} would be right; the control takes what others leave")
    return replace(plan, stopped=plan.stopped | {arm}, moved_unix=unix)


def weighed(plan: Plan, weights: tuple[float, ...], unix: float) -> Plan:
    """The same experiment with other weights."""
    if len(weights) != len(plan.arms):
        raise ValueError(f"{len(weights)} weights for {len(plan.arms)} arms; one for each would be right")
    return replace(plan, weights=weights, moved_unix=unix)
