"""Whether a gateway admits and paces by the objectives that a run judges its answers by.

A run has its own (`--objective`, `--config` or those of the workload) and sends them along, but a request can only
tighten what its class says at the gateway. Where the gateway's are the tighter ones, answers are refused or hurried for
an objective that nobody counts, and a comparison of policies measures that too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import httpx

from loadtests.schedule import Schedule
from policies.model import ServiceClass

JUDGED = ("ttft_s", "ttft_s_per_token", "tpot_s", "itl_s", "e2e_s")


def differences(schedule: Schedule, table: Mapping[str, Mapping[str, Any]] | None) -> list[str]:
    """One line for each class of the schedule's rows that is tighter in the gateway's `table` of classes, or not there.

    None: the gateway tells no classes, so nothing is known."""
    if table is None:
        return []
    used = {row.service_class for row in schedule.rows}
    lines = []
    for name, ours in schedule.classes.items():
        if name not in used:
            continue
        theirs = table.get(name)
        if theirs is None:
            lines.append(f"class {name}: the gateway has none of that name and refuses its requests")
        elif unlike := [key for key in JUDGED if _tighter(theirs.get(key), getattr(ours, key))]:
            lines.append(
                f"class {name}: judged by {_spelled(ours, unlike)}, but the gateway works for the tighter "
                f"{', '.join(f'{key} {_number(theirs.get(key))}' for key in unlike)}; loosen its class, or judge by "
                f"its own with --config FILE"
            )
    return lines


async def of(gateway: str, admin_token: str | None) -> Mapping[str, Mapping[str, Any]] | None:
    """The classes of a gateway by name, as its admin API tells them; None where it tells none."""
    headers = {"Authorization": f"Bearer {admin_token}"} if admin_token else {}
    async with httpx.AsyncClient(headers=headers, timeout=5.0, trust_env=False) as client:
        try:
            answer = await client.get(f"{gateway.rstrip('/')}/admin/config/classes")
        except httpx.HTTPError:
            return None
    found: Mapping[str, Mapping[str, Any]] | None = answer.json() if answer.status_code == 200 else None
    return found


def _tighter(theirs: float | None, ours: float | None) -> bool:
    return theirs is not None and (ours is None or theirs < ours)


def _spelled(ours: ServiceClass, keys: Collection[str]) -> str:
    return ", ".join(f"{key} {_number(getattr(ours, key))}" for key in keys)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
