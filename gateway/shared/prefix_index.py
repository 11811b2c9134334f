"""A sparse index of which prompts went where, for all gateways: keys at some depths of the chain.

A key is the chained hash at that depth (so it stands for the whole prefix up to there), its value the up to four
replicas that answered such a prompt last, each with the start of its process, so that a restarted one is not believed
in. Depths: four per doubling, and the prompt's end, there with the length of what followed it (its answer), so that the
next turn finds all of the one before; after a long answer or question it finds the prompt but for seven chunks.
Looked up before a request goes to the core, written after its first token and again when it ends, and only if that says
something new. Only hashes are stored, for as long as a cache keeps them.
Trade-off: of prompts that part inside, a fifth of a match may lie between two depths; what a gateway saw itself is
exact and wins.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from gateway.shared.store import Command, Store
from policies.prefix import asked, told

MOST_HOLDERS = 4
MOST_PENDING = 20_000  # keys that wait to be written
MOST_WRITTEN = 100_000  # keys remembered as written lately
LEAST_S = 5.0  # a key lives
BATCH = 500
MOST_DIGITS = 6  # of how many chunks follow: a million are 256 MB
# KEYS: hashes. ARGV: how many holders, then of each key its replica and how long it lives in ms.
REMEMBER = """
for i, key in ipairs(KEYS) do
  local me = ARGV[2 * i]
  local who = string.match(me, '^(.*)@')
  local holders, out, n = redis.call('GET', key), me, 1
  if holders then
    for one in string.gmatch(holders, '[^|]+') do
      if string.match(one, '^(.*)@') ~= who and n < tonumber(ARGV[1]) then out = out .. '|' .. one; n = n + 1 end
    end
  end
  redis.call('SET', key, out, 'PX', ARGV[2 * i + 1])
end
return #KEYS
"""


class PrefixIndex:
    """`started_at` answers when a replica's process started, in unix seconds (None: unknown), `stays_s` how long what
    nobody uses stays in its cache: longer than that no key is believed in, nor longer than `index_ttl_s`."""

    def __init__(
        self,
        store: Store,
        started_at: Callable[[str], float | None],
        clock: Callable[[], float],
        stays_s: Callable[[str], float] = lambda _: math.inf,
    ) -> None:
        self._store = store
        self._started_at = started_at
        self._stays_s = stays_s
        self._clock = clock
        self._pending: dict[str, tuple[str, float]] = {}  # what is said of a key, and for how long
        self._written: dict[tuple[str, str], float] = {}
        self._order: deque[tuple[tuple[str, str], float]] = deque()  # of `_written`, and of what was there before

    def keys(self, chain: Sequence[int]) -> list[str]:
        return [self._key(chain, depth) for depth in asked(len(chain))]

    def found(self, values: Sequence[bytes | None], length: int) -> Mapping[str, int]:
        """Replica -> chunks that it was sent before; `values` as they were read for the `keys` of a chain so long."""
        out: dict[str, int] = {}
        for depth, value in zip(asked(length), values, strict=True):
            if value is None:
                continue
            for one in value.decode("utf-8", "replace").split("|"):
                replica, _, rest = one.rpartition("@")
                started, _, more = rest.partition("+")
                if self._same(replica, started):
                    out[replica] = depth + (int(more) if more.isdecimal() and len(more) <= MOST_DIGITS else 0)
        return out

    def answered(self, chain: Sequence[int], replica_id: str, more: int = 0) -> None:
        """A replica has prefilled this prompt; `more`: chunks that follow its last one, its answer's when it ended."""
        lives_s = max(LEAST_S, min(self._store.table.index_ttl_s, self._stays_s(replica_id)))
        now, fresh_s = self._clock(), lives_s / 4
        if not self._store.up or "|" in replica_id:
            return
        me = f"{replica_id}@{self._start_of(replica_id)}"
        for depth in told(len(chain)):
            key, said = self._key(chain, depth), f"{me}+{more}" if more and depth == len(chain) else me
            before = self._written.get((key, said))
            if (before is None or now - before > fresh_s) and len(self._pending) < MOST_PENDING:
                self._pending[key] = (said, lives_s)

    def commands(self) -> list[Command]:
        """What is to be written now."""
        pending, self._pending = self._pending, {}
        if not pending:
            return []
        now = self._clock()
        for key, (said, _) in pending.items():
            self._written[key, said] = now
            self._order.append(((key, said), now))
        while len(self._order) > MOST_WRITTEN:
            oldest, at = self._order.popleft()
            if self._written.get(oldest) == at:  # not written again since
                del self._written[oldest]
        keys = list(pending)
        return [_remember({key: pending[key] for key in keys[i : i + BATCH]}) for i in range(0, len(keys), BATCH)]

    def forget_written(self) -> None:
        """Redis may have lost what we wrote."""
        self._written.clear()
        self._order.clear()

    def _key(self, chain: Sequence[int], depth: int) -> str:
        return self._store.key("p", f"{chain[depth - 1]:016x}")

    def _same(self, replica: str, started: str) -> bool:
        mine = self._start_of(replica)
        return not mine or not started or mine == started

    def _start_of(self, replica_id: str) -> str:
        at = self._started_at(replica_id)
        return "" if at is None else str(round(at))


def _remember(rows: Mapping[str, tuple[str, float]]) -> Command:
    said = [part for value, lives_s in rows.values() for part in (value, round(lives_s * 1000))]
    return ("EVAL", REMEMBER, len(rows), *rows, MOST_HOLDERS, *said)
