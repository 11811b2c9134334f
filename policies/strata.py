"""Which requests belong together, told from their prefix chains alone, and which of them are worth a closer look.

The part of a chain that was seen before is followed at depths 1, 2, 4, ... as long as it is frequent: at least 1 in 256
of recent requests. The deepest such node is the request's stratum; what shares nothing frequent is in one of its own.
Counts are those of Misra and Gries (1982) with all counters halved when there are too many, so memory is bounded and no
frequent node is missed; what came once has no node. Of a stratum the first few requests are looked at, then those
whose known part is short of its usual or, where a leak was found, all, else one in 16. Each stands for all of its
stratum since the one before: sums over samples then estimate sums over requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

MOST_NODES = 4_096
FREQUENT = 1 / 256
LEAST = 4
FIRST = 6  # samples of a new stratum
ONE_IN = 16
SHORT = 0.8
MEMORY = 0.1


@dataclass(slots=True)
class Stratum:
    count: float = 2.0  # a node is made when its chunk comes again
    pending: int = 0  # requests since the last sample
    samples: int = 0
    usual_chunks: float = 0.0  # known chunks, running mean
    leaky: bool = False

    def take(self) -> int:
        """A request of it is looked at now: how many it stands for."""
        weight, self.pending = self.pending, 0
        self.samples += 1
        return weight


class Strata:
    """Owner of the nodes."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._nodes: dict[int, Stratum] = {}
        self._total = 0.0
        self.rare = Stratum()  # what shares nothing frequent

    def __len__(self) -> int:
        return len(self._nodes)

    def of(self, chain: Sequence[int], known_chunks: int) -> Stratum:
        """Counts the part of the chain that was seen before, and answers where the request belongs."""
        nodes, found, depth = self._nodes, self.rare, 1
        self._total += 1.0
        frequent = max(LEAST, FREQUENT * self._total)
        while depth <= known_chunks:
            node = nodes.get(chain[depth - 1])
            if node is None:
                nodes[chain[depth - 1]] = Stratum()
            else:
                node.count += 1.0
                if node.count >= frequent:
                    if not node.samples and found.samples and found is not self.rare:
                        node.samples = min(found.samples, FIRST - 2)  # looked at already, as part of the one above
                    found = node
            depth *= 2
        if len(nodes) > MOST_NODES:
            self._halve()
        return found

    def wanted(self, stratum: Stratum, known_chunks: int) -> bool:
        """Whether a request of the stratum, of which so many chunks were seen before, is worth a look."""
        stratum.pending += 1
        usual = stratum.usual_chunks
        stratum.usual_chunks += MEMORY * (known_chunks - usual)
        if stratum.samples < FIRST or stratum.leaky or stratum is self.rare or known_chunks < SHORT * usual - 1.0:
            return True
        return self._rng.random() * ONE_IN < 1.0

    def _halve(self) -> None:
        while len(self._nodes) > MOST_NODES // 2:
            self._total *= 0.5
            for key, node in list(self._nodes.items()):
                node.count *= 0.5
                if node.count < 1.0:
                    del self._nodes[key]
