"""Which LoRA adapters are on a replica's GPU, as far as our own dispatches and the last scrape tell.

vLLM keeps at most max_loras adapters in a batch; a request for another one waits until a running adapter has no
request left, and loading one takes time whenever the least recently used has to go. Own dispatches count at once,
because a scrape is seconds late and a burst for one adapter must not load it everywhere. State of an adapter on a
replica: loaded, room (a slot is free or idle: it costs a load), or full (every slot is busy: it also waits).
Trade-off: adapters used by other gateways are seen only through the scrape.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from policies.model import Completed, Dispatched, PolicyEvent, Removed, Restarted, Scraped


class AdapterState(Enum):
    LOADED = "loaded"
    ROOM = "room"
    FULL = "full"


class _Slots:
    __slots__ = ("busy", "loaded", "most")

    def __init__(self) -> None:
        self.most: int | None = None  # max_loras; None: not known, never full
        self.loaded: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self.busy: dict[str, int] = {}  # adapter -> our open requests


class AdapterSlots:
    """All replicas; fed by `observe`."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Slots] = {}

    def state(self, replica_id: str, adapter: str) -> AdapterState:
        slots = self._replicas.get(replica_id)
        if slots is None:
            return AdapterState.ROOM
        if adapter in slots.loaded:
            return AdapterState.LOADED
        if slots.most is not None and len(slots.busy) >= slots.most:
            return AdapterState.FULL
        return AdapterState.ROOM

    def observe(self, event: PolicyEvent) -> None:
        match event:
            case Dispatched(request=request, replica_id=replica_id) if request.adapter is not None:
                slots = self._replicas.setdefault(replica_id, _Slots())
                slots.busy[request.adapter] = slots.busy.get(request.adapter, 0) + 1
                self._load(slots, request.adapter)
            case Completed(request=request, replica_id=replica_id) if request.adapter is not None:
                known = self._replicas.get(replica_id)
                if known is not None and request.adapter in known.busy:
                    known.busy[request.adapter] -= 1
                    if known.busy[request.adapter] <= 0:
                        del known.busy[request.adapter]
            case Scraped() if event.max_adapters is not None:
                slots = self._replicas.setdefault(event.replica_id, _Slots())
                slots.most = event.max_adapters
                for adapter in event.adapters_running:
                    self._load(slots, adapter)
            case Removed(replica_id=replica_id) | Restarted(replica_id=replica_id):
                self._replicas.pop(replica_id, None)
            case _:
                pass

    def _load(self, slots: _Slots, adapter: str) -> None:
        slots.loaded[adapter] = None
        slots.loaded.move_to_end(adapter)
        while slots.most is not None and len(slots.loaded) > slots.most:
            idle = next((name for name in slots.loaded if name not in slots.busy), None)
            if idle is None:
                return
            del slots.loaded[idle]
