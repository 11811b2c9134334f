"""What baselines remember of prompts: per replica an LRU of chained block keys, with an optional age limit.

The projects differ in block size, capacity and age; the rule is one: a prompt sent to a replica is assumed to be there,
and the match is the number of leading blocks present. Our own index (`index.py`) knows more (credit for answers,
feedback); baselines use this plainer one so that they stay what their projects define.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from policies.model import Request

MOST_BLOCKS = 2048  # llm-d's cap per prompt


class Remembered:
    """Leading blocks per replica. capacity: blocks per replica; ttl_s: None never ages."""

    def __init__(self, capacity: int, ttl_s: float | None = None) -> None:
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._used: dict[str, OrderedDict[int, float]] = {}

    def insert(self, replica_id: str, keys: Sequence[int], now: float) -> None:
        """The replica got a prompt of these blocks; its tail becomes the older end."""
        used = self._used.setdefault(replica_id, OrderedDict())
        for key in reversed(keys):
            used[key] = now
            used.move_to_end(key)
        while len(used) > self._capacity:
            used.popitem(last=False)

    def matched(self, replica_id: str, keys: Sequence[int], now: float) -> int:
        """Leading blocks present: holding one implies holding those before it, hence the bisection."""
        used = self._used.get(replica_id)
        if not used:
            return 0
        oldest = float("-inf") if self._ttl_s is None else now - self._ttl_s
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            at = used.get(keys[middle])
            if at is not None and at >= oldest:
                low = middle + 1
            else:
                high = middle
        return low

    def size(self, replica_id: str) -> int:
        return len(self._used.get(replica_id, ()))

    def forget(self, replica_id: str) -> None:
        """Removed or restarted."""
        self._used.pop(replica_id, None)


def block_keys(request: Request, characters: int) -> Sequence[int]:
    """Chained keys of the text's full blocks of so many characters; without text the request's own chunk keys."""
    if request.text is None:
        return request.chain
    text = request.text()
    keys: list[int] = []
    key = 0
    for start in range(0, min(len(text) - characters + 1, characters * MOST_BLOCKS), characters):
        key = xxh3_64_intdigest(text[start : start + characters].encode("utf-8", "surrogatepass"), key)
        keys.append(key)
    return keys
