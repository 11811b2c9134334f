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
    """What a core before this one had learnt. A replica of which nothing is said starts from what the fleet showed;
    what is said of one that is not there (any more) is left out."""
    if said["fleet"] is not None:
        dispatcher.fleet.prior.believe(said["fleet"])
    for replica in dispatcher.fleet.replicas.values():
        if replica.prefill.samples:
            continue
        if replica.id in said["replicas"]:
            prefill, replica.decode.idle_s, replica.decode.busy_s = said["replicas"][replica.id]
            replica.prefill.believe(prefill)
        elif not replica.prefill.hinted:
            replica.prefill.adopt(dispatcher.fleet.prior)
    dispatcher.affinity.bytes_per_token.recall(said["bytes_per_token"])
    dispatcher.margins.recall(said["margins"])
