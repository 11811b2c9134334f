"""What was seen before, in bounded memory: two generations of keys, the older one dropped when the young one is full.

A key that is asked for or added again moves to the young generation, so what is in use stays. Holds between `most` / 2
and `most` keys, at about 100 bytes each. Trade-off: the age at which something is forgotten is only known to a factor
of two, for one dictionary write per key and no list to keep in order.
"""

from __future__ import annotations

from collections.abc import Sequence


class Seen:
    """Set of ints with a bounded memory."""

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._young: dict[int, None] = {}
        self._old: dict[int, None] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._young or key in self._old

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, keys: Sequence[int]) -> None:
        self._young.update(dict.fromkeys(keys))
        if len(self._young) > self._half:
            self._old, self._young = self._young, {}

    def visit(self, chain: Sequence[int]) -> int:
        """Leading keys of a prefix chain that were seen; the chain is seen from now on.

        Having one key implies having had all before it, in each generation, so the depth is found by halving.
        """
        young, old = self._young, self._old
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            key = chain[middle]
            if key in young or key in old:
                low = middle + 1
            else:
                high = middle
        if low and chain[low - 1] in young:
            if low < len(chain):
                self.add(chain[low:])
        else:
            self.add(chain)
        return low
