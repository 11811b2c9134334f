"""JSON of messages and journal lines, data classes inside them as objects.

orjson writes data classes by itself, but reads them from where the interpreter keeps their fields, and those of a
compiled class are elsewhere. So each is handed to `fields_of`, which asks it. Costs a microsecond for each of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson

_names: dict[type, tuple[str, ...]] = {}


def dumps(value: Any, option: int = 0) -> bytes:
    """Raises TypeError for what is neither JSON nor a data class (orjson.JSONEncodeError is one)."""
    return orjson.dumps(value, fields_of, option | orjson.OPT_PASSTHROUGH_DATACLASS)


def fields_of(value: Any) -> dict[str, Any]:
    """Raises TypeError for what is no data class."""
    kind = type(value)
    names = _names.get(kind)
    if names is None:
        names = _names[kind] = tuple([field.name for field in dataclasses.fields(value)])
    return {name: getattr(value, name) for name in names}
