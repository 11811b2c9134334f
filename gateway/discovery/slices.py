"""EndpointSlices as the Kubernetes API gives them, and the replicas they name. Pure.

A pod is one replica, whatever the number of slices, address families or services it stands in: its UID says so. Its
name is the replica's id; a StatefulSet gives the same name to another pod later, and the UID tells them apart. An
endpoint without a pod (a Service with hand-written endpoints) is known by its address only.
Ready counts as Kubernetes means it: an absent `ready` is true, and a terminating endpoint is not ready.
Source: the discovery.k8s.io/v1 reference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gateway.discovery.membership import Member
from gateway.sections import Replica

MOST_ID = 64  # characters of a replica's id


@dataclass(slots=True, frozen=True)
class Spoken:
    """How the replicas of a selector are reached."""

    scheme: str = "http"
    port: str | None = None  # name or number; None: the first of the slice
    key_env: str | None = None
    ca_file: str | None = None


def members(slices: Iterable[Mapping[str, Any]], spoken: Spoken) -> list[Member]:
    """One member per pod, ready if any slice says so; what cannot be understood is left out."""
    found: dict[str, Member] = {}
    taken: dict[str, str] = {}  # address: who has it
    for member in sorted(_each(slices, spoken), key=lambda m: (not m.ready, "[" in m.table.url, m.table.url, m.who)):
        if member.who not in found and taken.setdefault(member.table.url, member.who) == member.who:
            found[member.who] = member
    return sorted(found.values(), key=lambda m: m.table.name)


def _each(slices: Iterable[Mapping[str, Any]], spoken: Spoken) -> Iterator[Member]:
    for one in slices:
        port = _port(one.get("ports") or [], spoken.port)
        for endpoint in one.get("endpoints") or []:
            addresses = endpoint.get("addresses") or []
            if port is None or not addresses:
                continue
            host = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
            conditions = endpoint.get("conditions") or {}
            pod = endpoint.get("targetRef") or {}
            by_pod = pod.get("kind") == "Pod" and pod.get("name") and pod.get("uid")
            try:
                table = Replica(
                    url=f"{spoken.scheme}://{host}:{port}",
                    id=_short(pod["name"]) if by_pod else None,
                    key_env=spoken.key_env,
                    ca_file=spoken.ca_file,
                )
            except ValidationError:
                continue
            ready = conditions.get("ready") is not False and not conditions.get("terminating")
            yield Member(table, identity=str(pod["uid"]) if by_pod else "", ready=ready)


def _port(ports: list[Mapping[str, Any]], wanted: str | None) -> int | None:
    """The number of the port of that name or number; a number need not be listed, since null means all."""
    if wanted is not None and wanted.isdecimal():
        return int(wanted)
    numbers = [p.get("port") for p in ports if wanted is None or p.get("name") == wanted]
    return next((n for n in numbers if isinstance(n, int)), None)


def _short(name: str) -> str:
    if len(name) <= MOST_ID:
        return name
    return f"{name[: MOST_ID - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
