"""Whether a gateway admits and paces by the objectives that a run judges its answers by.

A run has its own (`--objective`, `--config` or those of the workload), the gateway those of its configuration, and a
request can only tighten them. Where they differ, answers are refused or hurried for an objective that nobody counts,
and a comparison of policies measures that difference too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import httpx

from loadtests.schedule import Schedule
from policies.model import ServiceClass

JUDGED = ("ttft_s", "ttft_s_per_token", "tpot_s", "itl_s", "e2e_s")


def differences(schedule: Schedule, table: Mapping[str, Mapping[str, Any]] | None) -> list[str]:
    """One line for each class of the schedule's rows that the gateway's `table` of classes has otherwise or not.

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
        elif unlike := [key for key in JUDGED if theirs.get(key) != getattr(ours, key)]:
            lines.append(
                f"class {name}: judged by {_spelled(ours, unlike)}, but the gateway works for "
                f"{', '.join(f'{key} {_number(theirs.get(key))}' for key in unlike)}; change one of them "
                f"(--config FILE judges by the gateway's own)"
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


def _spelled(ours: ServiceClass, keys: Collection[str]) -> str:
    return ", ".join(f"{key} {_number(getattr(ours, key))}" for key in keys)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
