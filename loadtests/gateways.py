"""The simulated gateways: their cores, the requests they hand to them, and what they tell each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from loadtests.chains import Chains
from loadtests.schedule import Row, Schedule
from loadtests.seeds import mix, name_id
from loadtests.simreplica import SimReplica
from policies.core import Balancer
from policies.fleet_state import Replica
from policies.model import Decision, PeerLoad, Request, ServiceClass
from policies.policy import RoutingPolicy
from policies.settings import Settings

PEER_S = 0.1  # how often gateways tell each other their load
RING_S = 0.005  # until the others have heard of a long prefill


def balancers(
    policy: Callable[[random.Random], RoutingPolicy],
    classes: Mapping[str, ServiceClass],
    settings: Settings,
    gateways: int,
    seed: int,
) -> list[Balancer]:
    """One core per gateway, each with its own policy and its own source of chance."""
    cores = []
    for gateway in range(gateways):
        rng = random.Random(mix(seed, name_id("gateway"), gateway))
        cores.append(Balancer(dict(classes), policy(rng), settings, rng))
    return cores


class RequestMaker:
    """Schedule rows as a gateway would see them: lengths in bytes, a chain, objectives, nothing about the answer."""

    def __init__(self, schedule: Schedule, shared_index: bool = False) -> None:
        self.schedule = schedule
        self.shared_index = shared_index
        self.chains = Chains(schedule.block_tokens)
        self.following = {  # a turn -> the closed-loop turn that waits for its answer
            turn.id: after
            for turns in schedule.sessions.values()
            for turn, after in pairwise(turns)
            if after.at_s is None
        }
        self.expect: Callable[[Row], int] | None = None  # expected output tokens; None: nobody knows

    def went_to(self, row: Row, replica: Replica, now: float, answer_tokens: int = 0) -> None:
        """For the index that gateways share, where they do: at dispatch, and again with the length of its answer.
        `replica` is as its gateway knows it."""
        if self.shared_index:
            self.chains.share(row, replica.id, now, answer_tokens, replica.keeps_s)

    def held_after(self, row: Row) -> tuple[int, ...]:
        """Ids of the blocks an engine holds when it has answered: the prompt's, and the answer's as far as known.

        A client sends the answer back in its next turn, so the next prompt's ids name the answer's full blocks. In a
        trace without sessions nobody knows which row that is: there an answer is never hit.
        """
        after, size = self.following.get(row.id), self.schedule.block_tokens
        if after is None:
            return row.blocks
        full, filled = row.prompt_tokens // size, (row.prompt_tokens + row.output_tokens) // size
        if after.blocks[:full] != row.blocks[:full] or filled < len(row.blocks):
            return row.blocks
        return after.blocks[:filled]

    def request(self, row: Row, now: float) -> Request:
        bounds = self.schedule.objectives(row)
        return Request(
            id=str(row.id),
            adapter=row.adapter,
            tenant=row.tenant,
            session=row.session,
            service_class=row.service_class,
            received_at=now,
            ttft_deadline=None if bounds.ttft_s is None else now + bounds.ttft_s,
            tpot_s=bounds.tpot_s,
            itl_s=bounds.itl_s,
            deadline=None if bounds.e2e_s is None else now + bounds.e2e_s,
            prompt_bytes=row.prompt_tokens * self.chains.bytes_per_token,
            prompt_tokens=row.prompt_tokens,
            chain=self.chains.of(row),
            text=lambda: self.chains.text(row),
            expected_tokens=0 if self.expect is None else self.expect(row),
            shared_depth=self.chains.shared_depth(row, now) if self.shared_index else {},
        )


class Peers:
    """What gateways know of each other, as their registers would tell it."""

    def __init__(self, cores: Sequence[Balancer]) -> None:
        self._cores = cores
        self._spent: dict[tuple[int, int, str], float] = {}  # reader, gateway, replica: what it had sent there then

    def exchange(
        self, gateways: Iterable[int], replicas: Mapping[str, SimReplica], now: float
    ) -> Iterator[tuple[int, list[Decision]]]:
        """What these decide when they hear of the others, one after the other."""
        for gateway in gateways:
            self.tell(gateway, now)
            core = self._cores[gateway]
            for replica in replicas.values():
                yield gateway, core.fleet_event(self.load(replica, gateway, now), now)

    def tell(self, gateway: int, now: float) -> None:
        """What it hears of demand and overload at all others."""
        core = self._cores[gateway]
        others = [(g, other) for g, other in enumerate(self._cores) if g != gateway]
        core.shared_with(sum(other.demand(now) for _, other in others), now)
        for g, other in others:
            core.overloaded_elsewhere(f"g{g}", other.overload(), now)

    def load(self, replica: SimReplica, gateway: int, now: float) -> PeerLoad:
        """What all other gateways have on a replica."""
        total = PeerLoad(replica.id, at=now)
        for g, core in enumerate(self._cores):
            row = core.loads(now).get(replica.id) if g != gateway else None
            if row is not None:
                key = (gateway, g, replica.id)
                more = row[6] - self._spent.get(key, row[6])
                self._spent[key] = row[6]
                total = total.plus(PeerLoad(replica.id, row[0], row[1], row[2], now, *row[3:6], more, row[7]))
        return total
