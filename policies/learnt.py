"""What a core has learnt, as plain values small enough to be kept by others: a core that follows need not start anew.

Prefill and decode speed of each replica and of the fleet, bytes per token of each model, margins of each class. Taken
over as a belief: a replica's own samples count from then on as they do for a hint of the configuration. The prefix
index is not among it: it is large, and what a restart of the core takes from it the engines still hold. Trade-off: what
has changed in between is believed for a few requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.dispatching import Dispatcher

Learnt = Mapping[str, Any]


def learnt(dispatcher: Dispatcher) -> dict[str, Any]:
    """Nothing of a replica that has shown nothing."""
    return {
        "fleet": dispatcher.fleet.prior.believes() if dispatcher.fleet.prior.samples else None,
        "replicas": {
            r.id: [r.prefill.believes(), r.decode.idle_s, r.decode.busy_s]
            for r in dispatcher.fleet.replicas.values()
            if r.prefill.samples
        },
        "bytes_per_token": dispatcher.affinity.bytes_per_token.learnt(),
        "margins": dispatcher.margins.values(),
    }


def recall(dispatcher: Dispatcher, said: Learnt) -> None:
    """What a core before this one had learnt; replicas that are not there (any more) are left out."""
    if said["fleet"] is not None:
        dispatcher.fleet.prior.believe(said["fleet"])
    for name, (prefill, idle_s, busy_s) in said["replicas"].items():
        replica = dispatcher.fleet.replicas.get(name)
        if replica is not None and not replica.prefill.samples:
            replica.prefill.believe(prefill)
            replica.decode.idle_s, replica.decode.busy_s = idle_s, busy_s
    dispatcher.affinity.bytes_per_token.recall(said["bytes_per_token"])
    dispatcher.margins.recall(said["margins"])
