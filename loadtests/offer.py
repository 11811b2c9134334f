"""What a command line offers: a workload or trace, cut to a window, with the objectives it is judged by.

`--objective ttft=2s+0.25ms/token,tpot=80ms,itl=1s,e2e=30s` replaces the objectives of every class that has the bound
(batch without a TTFT objective stays without one); `name:ttft=...` those of one class. `none` removes a bound.
D defaults to the longest time that an on-time request of the source may take. Trade-off: one spelling for all
commands, so that a live run and its simulation are asked for in the same words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gateway import config as gateway_config
from loadtests import traces
from loadtests.schedule import Schedule, ScheduleError
from loadtests.source import Generator, Source, cap_prompts, cap_sessions, thin
from loadtests.workloads import CLASSES, WORKLOADS
from policies.model import ServiceClass

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
AMOUNT = re.compile(r"^\s*([0-9.]+(?:e-?[0-9]+)?)\s*(us|ms|s|m|h)\s*$")
OBJECTIVE_HELP = "Objectives, like ttft=2s+0.25ms/token,tpot=80ms; a class by its name: batch:e2e=300s."
CONFIG_HELP = "Gateway configuration, for its classes and their objectives."
EXAMPLE = "ttft=2s+0.25ms/token,tpot=80ms"


@dataclass(slots=True, frozen=True)
class Offer:
    """A source with the classes its rows are judged by; `schedule` cuts one run out of it."""

    source: Source | Generator
    classes: Mapping[str, ServiceClass]
    window_s: float
    drain_s: float

    def schedule(self, seed: int = 0, load: float = 1.0) -> Schedule:
        return self.source.cut(seed, load, self.window_s, self.drain_s, self.classes)


def offer(
    workload: str | None,
    trace: Path | None,
    *,
    window_s: float,
    drain_s: float | None = None,
    objectives: Sequence[str] = (),
    form: str | None = None,
    thin_to: float = 1.0,
    longest_prompt: int | None = None,
    think_cap_s: float | None = None,
    max_turns: int | None = None,
    classes: Mapping[str, ServiceClass] | None = None,
) -> Offer:
    """`classes` of a configuration (`classes_of`) stand over the built-in ones.

    Raises ScheduleError naming the option, its value and what would be right.
    """
    if (workload is None) == (trace is None):
        raise ScheduleError("give either --workload NAME or --trace FILE")
    if not window_s > 0.0:
        raise ScheduleError(f"--window {window_s:g}: more than 0 seconds would be right")
    source: Source | Generator
    if workload is not None:
        if workload not in WORKLOADS:
            raise ScheduleError(f"--workload {workload!r}: one of {', '.join(WORKLOADS)} would be right")
        source = WORKLOADS[workload]
    else:
        assert trace is not None
        source = traces.read(trace, form)
    if isinstance(source, Source):
        if thin_to < 1.0:
            source = thin(source, thin_to)
        if longest_prompt is not None:
            source = cap_prompts(source, longest_prompt)
        if think_cap_s is not None or max_turns is not None:
            source = cap_sessions(source, math.inf if think_cap_s is None else think_cap_s, max_turns)
    elif given := [
        option
        for option, there in (
            ("--thin", thin_to < 1.0),
            ("--longest-prompt", longest_prompt is not None),
            ("--think-cap", think_cap_s is not None),
            ("--max-turns", max_turns is not None),
        )
        if there
    ]:
        raise ScheduleError(
            f"{' and '.join(given)}: for traces only, and {source.name} is generated; --load changes its rate"
        )
    judged = {**CLASSES, **(classes or {})}
    for text in objectives:
        judged = with_objective(judged, text)
    drain = source.longest_s(judged) if drain_s is None else drain_s
    if drain < 0.0:
        raise ScheduleError(f"--drain {drain:g}: at least 0 seconds would be right")
    return Offer(source, judged, window_s, drain)


def classes_of(config: Path | None) -> Mapping[str, ServiceClass] | None:
    """The classes of a gateway configuration, for `offer`; None without one. Raises gateway.config.ConfigError."""
    return None if config is None else gateway_config.load(config).service_classes()


def with_objective(classes: Mapping[str, ServiceClass], text: str) -> dict[str, ServiceClass]:
    """The classes with the bounds of one `--objective` replaced."""
    name, colon, bounds = text.partition(":")
    if colon and name.strip() not in classes:
        raise ScheduleError(f"--objective {text!r}: class {name.strip()!r} is none of {', '.join(sorted(classes))}")
    wanted = [name.strip()] if colon else list(classes)
    changed = dict(classes)
    for part in (bounds if colon else text).split(","):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or key not in ("ttft", "tpot", "itl", "e2e"):
            raise ScheduleError(f"--objective {text!r}: {part.strip()!r} is no bound; {EXAMPLE} would be right")
        for one in wanted:
            held = getattr(changed[one], f"{key}_s")
            if held is None and not colon and key != "itl":
                continue  # a class without this bound keeps none unless it is named
            changed[one] = replace(changed[one], **_bound(key, value.strip(), text))
    return changed


def _bound(key: str, value: str, text: str) -> dict[str, Any]:
    if value == "none":
        return {f"{key}_s": None}
    base, plus, per_token = value.partition("+")
    bound: dict[str, Any] = {f"{key}_s": _seconds(base, text)}
    if key == "ttft":
        slope = 0.0
        if plus:
            if not per_token.strip().endswith("/token"):
                raise ScheduleError(f"--objective {text!r}: {per_token!r} should end in /token, like 0.25ms/token")
            slope = _seconds(per_token.strip().removesuffix("/token"), text)
        bound["ttft_s_per_token"] = slope
    elif plus:
        raise ScheduleError(f"--objective {text!r}: only ttft grows with the prompt")
    return bound


def _seconds(amount: str, text: str) -> float:
    match = AMOUNT.match(amount)
    if match is None:
        raise ScheduleError(f"--objective {text!r}: {amount.strip()!r} is no time; like 2s or 80ms would be right")
    try:
        value = float(match[1]) * UNITS[match[2]]
    except ValueError:
        value = math.nan
    if not value >= 0.0:
        raise ScheduleError(f"--objective {text!r}: {amount.strip()!r} is no time; like 2s or 80ms would be right")
    return value
