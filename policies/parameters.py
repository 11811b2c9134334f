"""Parameters of policies: dataclasses whose fields carry bounds, read from configuration with helpful errors.

A policy declares `@dataclass(frozen=True) class X: threshold: float = parameter(0.3, 0, 1, "share of ...")`; `read`
turns the mapping an operator wrote into one. Unknown names, wrong types and values out of bounds are errors that
name policy, field, value and what would be accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")


def parameter(default: Any, low: float | None = None, high: float | None = None, about: str = "") -> Any:
    """A dataclass field with inclusive bounds (None: none) and a one-line description with its unit."""
    return field(default=default, metadata={"low": low, "high": high, "about": about})


@dataclass(frozen=True)
class NoParameters:
    """Of the rules that have nothing to set."""


def read(policy: str, kind: type[T], settings: Mapping[str, Any] | None) -> T:
    """An instance of the dataclass `kind` from what was configured for `policy`; ValueError says what is wrong."""
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in (settings or {}).items():
        spec = known.get(name)
        if spec is None:
            accepted = ", ".join(sorted(known)) or "none, it has no parameters"
            raise ValueError(f"policy {policy!r} has no parameter {name!r}; accepted: {accepted}")
        values[name] = _checked(policy, name, value, spec.default, spec.metadata)
    return kind(**values)


def _checked(policy: str, name: str, value: Any, default: Any, bounds: Mapping[str, Any]) -> Any:
    where = f"policy {policy!r}: parameter {name!r} is {value!r}"
    if isinstance(default, bool) or isinstance(value, bool):
        if not (isinstance(default, bool) and isinstance(value, bool)):
            raise ValueError(f"{where}; it must be {_kind(default)}")
        return value
    if isinstance(default, int) and not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise ValueError(f"{where}; it must be {_kind(default)}")
    if isinstance(default, float) and not isinstance(value, int | float):
        raise ValueError(f"{where}; it must be {_kind(default)}")
    if isinstance(default, str):
        if not isinstance(value, str):
            raise ValueError(f"{where}; it must be {_kind(default)}")
        return value
    number = type(default)(value)
    low, high = bounds.get("low"), bounds.get("high")
    if number != number or (low is not None and number < low) or (high is not None and number > high):
        wanted = f"at least {low}" if high is None else f"at most {high}" if low is None else f"from {low} to {high}"
        raise ValueError(f"{where}; it must be {wanted}")
    return number


def _kind(default: Any) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[type(default)]
