"""An experiment and its power calculation as tables for people; nothing parses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from policies.power import Needs, Traffic


def show(console: Console, told: Mapping[str, Any]) -> None:
    """What `experiment_results.results` says."""
    state = told["state"] + (f" ({told['ended_why']})" if told["ended_why"] else "")
    table = Table(
        title=f"{told['name']}: {told['design']} by {told['key']}, {state}, "
        f"{told['elapsed_s'] / 3600:.1f} h, {told['offered_rps']:.1f} requests a second counted"
        + (f" at {told['gateways']} gateways" if told.get("gateways") else "")
    )
    for column in ("arm", "weight", "requests", "attainment", "95 %", "difference", "95 %", "goodput", "state"):
        table.add_column(column, justify="left" if column in ("arm", "state") else "right")
    for arm in told["arms"]:
        mine, other = arm["attainment_interval"], arm["difference"]
        table.add_row(
            f"{arm['name']} ({arm['policy']})",
            f"{arm['weight']:g}",
            f"{arm['requests']}",
            _share(arm["attainment"]),
            "" if mine is None else f"{mine[0]:.1%} to {mine[1]:.1%}",
            "control" if arm["control"] else _difference(other),
            _bounds(other),
            _goodput(arm["goodput_rps"], arm["goodput_interval"]),
            arm["state"] + (f": {arm['stopped_why']}" if arm["stopped_why"] else ""),
        )
    console.print(table)
    console.print(f"difference: {told['scope']}", highlight=False)
    watched = ", ".join(
        f"{arm['name']} {_share(arm['watched']['attainment'])} of {arm['watched']['requests']}"
        for arm in told["arms"]
        if arm["watched"]["requests"]
    )
    if watched:
        console.print(f"guard rails have seen, since the last weighing: attainment {watched}", highlight=False)
    for arm in told["arms"][1:]:
        for label, key in (("errors", "error_difference"), ("time per token over its objective", "pace_difference"),
                           ("beside the other arm, as a plain A/B test", "direct_difference"),
                           ("after another arm than after its own (carry-over)", "carry_over")):  # fmt: skip
            if arm[key] is not None:
                console.print(f"{arm['name']}: {label}: {_difference(arm[key])} {_bounds(arm[key])}", highlight=False)
    if told["interference"] is not None:
        found = told["interference"]
        console.print(f"interference that a plain reading misses: {_difference(found)} {_bounds(found)}")
    if told["strata"]:
        parts = Table(title="by class and prompt length (each interval true alone)")
        for column in ("", "arm", "requests", "attainment", "difference", "95 %"):
            parts.add_column(column, justify="right")
        for name, arms in told["strata"].items():
            for arm in arms:
                parts.add_row(
                    name, arm["name"], f"{arm['requests']}", _share(arm["attainment"]), _difference(arm["difference"]),
                    _bounds(arm["difference"]),
                )  # fmt: skip
        console.print(parts)
    for note in told["notes"]:
        console.print(f"- {note}", highlight=False)


def show_power(console: Console, traffic: Traffic, difference: float, rows: Sequence[tuple[str, Needs]]) -> None:
    spread = "not known" if traffic.slice_spread is None else f"{traffic.slice_spread:.1%}"
    console.print(
        f"{traffic.rate_rps:.1f} requests a second, attainment {traffic.attainment:.1%}, {traffic.turns:.1f} requests "
        f"a session (correlation {traffic.within:.2f}), spread of slices {spread}",
        highlight=False,
    )
    for why in dict.fromkeys(need.why for _, need in rows):
        console.print(f"- {why}", highlight=False)
    table = Table(title=f"to find a difference of {difference:.1%} in four runs of five, looking whenever you like")
    for column in ("design", "about", "counted requests", "blocks of slices"):
        table.add_column(column, justify="left" if column == "design" else "right")
    for name, need in rows:
        blocks = "" if need.blocks is None else f"{need.blocks:.0f}"
        table.add_row(name, _hours(need.hours), f"{need.requests:,.0f}", blocks)
    console.print(table)


def _goodput(rps: float | None, bounds: Sequence[float] | None) -> str:
    if rps is None:
        return ""
    return f"{rps:.2f}/s" + ("" if bounds is None else f" ({bounds[0]:.2f} to {bounds[1]:.2f})")


def _hours(hours: float) -> str:
    if hours < 1.0:
        return f"{hours * 60:.0f} min"
    return f"{hours:.1f} h" if hours < 48.0 else f"{hours / 24:.0f} days"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _difference(found: Mapping[str, Any] | None) -> str:
    return "" if found is None else f"{found['estimate']:+.2%}"


def _bounds(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    return "not yet" if found["low"] is None else f"{found['low']:+.2%} to {found['high']:+.2%}"
