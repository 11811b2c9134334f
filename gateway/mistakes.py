"""What pydantic finds wrong with a document, one line per mistake, and the document without what is wrong.

A line names the key, the value and what would be right; an unknown key that is valid elsewhere is told where. With
`without` the checks across tables can look at the rest of a document with mistakes; those that would then speak of
defaults in place of what was taken out are left to the next run (`Taken.hides`).
"""

from __future__ import annotations

import copy
import difflib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

WORDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text in quotes",
    "bool_type": "must be true or false",
    "string_too_short": "must not be empty",
    "list_type": "must be a list in [ ]",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "finite_number": "must be a finite number",
}
BOUNDS = {"greater_than": ("above", "gt"), "greater_than_equal": ("at least", "ge"),
          "less_than": ("below", "lt"), "less_than_equal": ("at most", "le")}  # fmt: skip
PATTERNS = {
    "^[0-9a-f]{64}$": "must be 64 lower-case hex digits, the SHA-256 of a key",
    "^[A-Za-z0-9._:-]{1,64}$": "must be 1 to 64 letters, digits or . _ : -",
}


def lines_of(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line per mistake in a document that should have been a `root`."""
    return [line_of(one, root) for one in error.errors()]


def line_of(error: ErrorDetails, root: type[BaseModel]) -> str:
    # "[key]" marks a mistake in the name of a table itself, as pydantic spells it
    location = [part for part in error["loc"] if part != "[key]"]
    key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        *table, wrong = location
        if places := _homes(str(wrong), root):
            return f"{key}: unknown key here; {wrong} belongs {' or '.join(places[:3])}"
        nearest = _nearest(str(wrong), _keys(table, root))
        return f"{key}: unknown key; the nearest valid one is {nearest}"
    if kind == "missing":
        return f"{key}: is missing; {_description(location, root)}"
    secret = "keys_sha256" in location or (location[-1:] == ["url"] and "@" in str(error["input"]))
    shown = "" if secret else f" = {_shown(error['input'])}"
    if kind in BOUNDS:
        word, bound = BOUNDS[kind]
        said = f"must be {word} {context[bound]:g}"
    elif kind == "literal_error":
        said = f"must be one of {context['expected']}"
    elif kind == "string_pattern_mismatch":
        said = PATTERNS[context["pattern"]]
    elif kind == "value_error":
        said = str(context["error"])
    else:
        said = WORDS.get(kind, error["msg"])
    return f"{key}{shown}: {said}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value[:80]}"'
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "a list"
    return str(value)


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The table class inside an annotation such as `list[Replica]` or `dict[Name, Tenant]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, dict, Annotated, types.UnionType):
        for inner in reversed(get_args(annotation)):
            if found := model_of(inner):
                return found
    return None


def _keys(location: Sequence[str | int], root: type[BaseModel]) -> list[str]:
    """Valid keys of the table at this place of the file."""
    table = root
    for part in location:
        if isinstance(part, str) and part in table.model_fields:
            table = model_of(table.model_fields[part].annotation) or table
    return list(table.model_fields)


def _description(location: Sequence[str | int], root: type[BaseModel]) -> str:
    table = root
    for part in location[:-1]:
        if isinstance(part, str) and part in table.model_fields:
            table = model_of(table.model_fields[part].annotation) or table
    return table.model_fields[str(location[-1])].description or ""


def _nearest(wrong: str, valid: Sequence[str]) -> str:
    return max(valid, key=lambda name: difflib.SequenceMatcher(None, wrong.lower(), name).ratio())


def _homes(key: str, root: type[BaseModel], table: str = "") -> list[str]:
    """Where in the file a key of this name would be valid."""
    found = []
    for name, info in root.model_fields.items():
        if name == key:
            found.append(f"into [{table}]" if table else "at the top level, above the first [table]")
        if inner := model_of(info.annotation):
            named = "NAME" if get_origin(info.annotation) is dict else ""
            found += _homes(key, inner, ".".join(part for part in (table, name, named) if part))
    return found


# -- the rest of a document ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Taken:
    """The tables that something with a mistake was taken out of."""

    tables: set[str]
    classes: bool  # whole classes, so that others may name one that is missing now

    def hides(self, line: str) -> bool:
        """Whether a mistake across tables may be none once the others are mended."""
        if "must be one of the classes" in line:
            return self.classes
        return _table(line.split(":")[0].split(" ")[0].replace("[", ".").replace("]", "").split(".")) in self.tables


def without(document: Mapping[str, Any], error: ValidationError) -> tuple[dict[str, Any], Taken]:
    """A copy in which every value with a mistake is left to its default."""
    rest = copy.deepcopy(dict(document))
    taken = Taken(set(), False)
    for one in error.errors():
        location = [part for part in one["loc"] if part != "[key]"]
        unknown = one["type"] == "extra_forbidden"
        if not unknown:
            taken.tables.add(_table([str(part) for part in location]))
            taken.classes |= location[0] == "classes" and len(location) < 3
            numbers = [at for at, part in enumerate(location) if isinstance(part, int)]
            del location[numbers[0] if numbers else len(location) :]  # a shorter list would number the others anew
        _drop(rest, location)
    return rest, taken


def _table(location: Sequence[str]) -> str:
    """Tenants and replicas have a table each."""
    return ".".join(location[: 2 if location[0] in ("tenants", "replicas") else 1])


def _drop(document: Any, location: Sequence[str | int]) -> None:
    *above, last = location
    for part in above:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(document, dict):
        document.pop(last, None)
