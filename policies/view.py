"""What a policy is shown and what it answers: replicas as one request finds them, and a choice.

Views are made once per replica and refreshed in place for each decision (`sight.py`); they are valid only during the
call that received them, and immutable to policies. `model.py` has all the other words and gives these too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from policies.model import Scraped


@dataclass(slots=True)
class ReplicaView:
    """One replica as a policy sees it for one request. Immutable to policies; the core reuses the objects."""

    id: str
    available: bool = True
    in_flight: int = 0
    prefill_backlog_tokens: float = 0.0  # W: uncached tokens dispatched and not yet prefilled
    uncached_tokens: float = 0.0  # u: of this request on this replica
    cached_tokens: float = 0.0
    predicted_ttft_s: float = 0.0
    predicted_tpot_s: float = 0.0
    kv_free_tokens: float | None = None  # None: unknown
    kv_capacity_tokens: float | None = None
    prefill_rate: float = 8000.0  # tokens/s
    live_decodes: int = 0
    kv_tokens: float = 0.0  # held by our own requests
    weight: float = 1.0
    preference_rank: int = 0  # position in the preference list of the request's affinity key
    homes: int = 1  # how many entries at the head of that list are homes of the key
    adapters: frozenset[str] = frozenset()
    adapter_room: bool = True
    role: str = "both"  # prefill | decode | both
    scraped: Scraped | None = None
    scraped_age_s: float | None = None


class FleetView(Sequence[ReplicaView]):
    """The replicas that serve a request's model or adapter, in stable order of addition.

    The lists it answers belong to the core: do not change them.
    """

    __slots__ = ("_available", "_by_id", "_prefillers", "_ranking", "replicas")

    def __init__(self, replicas: Sequence[ReplicaView]) -> None:
        self.replicas = replicas
        self._by_id: dict[str, ReplicaView] | None = None
        self._available: list[ReplicaView] | None = None  # None: ask each
        self._prefillers: list[ReplicaView] | None = None
        self._ranking: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self.replicas)

    def __iter__(self) -> Iterator[ReplicaView]:
        return iter(self.replicas)

    def __getitem__(self, index: int) -> ReplicaView:  # type: ignore[override]
        return self.replicas[index]

    def get(self, replica_id: str) -> ReplicaView | None:
        if self._by_id is None:
            self._by_id = {r.id: r for r in self.replicas}
        return self._by_id.get(replica_id)

    def available(self) -> list[ReplicaView]:
        if self._available is None:
            return [r for r in self.replicas if r.available]
        return self._available

    def prefillers(self) -> list[ReplicaView]:
        """The available ones that prefill; where none does, all available ones."""
        if self._prefillers is None:
            available = self.available()
            return [r for r in available if r.role != "decode"] or available
        return self._prefillers

    def rank(self) -> None:
        """Ask before reading `preference_rank` and `homes`: they are filled in for those policies only that look."""
        ranking, self._ranking = self._ranking, None
        if ranking is not None:
            ranking()

    def show(self, available: list[ReplicaView] | None) -> None:
        """For the core: who is available until the next call; None: the views themselves say it."""
        self._available, self._prefillers = available, None
        if available is not None:
            self._prefillers = [r for r in available if r.role != "decode"] or available

    def rank_by(self, ranking: Callable[[], None]) -> None:
        """For the core: what fills the ranks of the request looked at now."""
        self._ranking = ranking


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Choice:
    """What a policy answers. `scores` holds (replica id, score), lower is better; it may be empty."""

    replica_id: str | None
    reason: str  # affinity | spill | cold | load | turn | random | only_one | least_late | none_available
    scores: tuple[tuple[str, float], ...]

    def __init__(self, replica_id: str | None, reason: str = "", scores: tuple[tuple[str, float], ...] = ()) -> None:
        self.replica_id = replica_id
        self.reason = reason
        self.scores = scores
