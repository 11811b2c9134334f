"""What a PromQL expression reads: metric names, the labels it filters by, and those it groups by. No full parser."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

WORDS = {
    *("by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "bool", "offset", "inf"),
    *("sum", "min", "max", "avg", "count", "rate", "increase", "changes", "histogram_quantile", "round", "le"),
}
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(\{[^}]*\})?")
_MATCHER = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*(?:=~|!~|!=|=)\s*"[^"]*"')
_VARIABLE = re.compile(r"\$__?[a-z_]+|\$\{[a-z_]+\}|\$[a-z_]+")


@dataclass
class Reads:
    series: dict[str, set[str]] = field(default_factory=dict)  # metric: labels it is filtered by
    grouped: set[str] = field(default_factory=set)


def reads(expression: str) -> Reads:
    found = Reads()
    for group in _GROUPING.findall(expression):
        found.grouped |= {label.strip() for label in group.split(",") if label.strip()}
    rest = _VARIABLE.sub("x", _GROUPING.sub(" ", expression))
    rest = re.sub(r"\[[^\]]*\]", " ", rest)
    for name, matchers in _SELECTOR.findall(rest):
        if name not in WORDS and name != "x":
            found.series.setdefault(name, set()).update(_MATCHER.findall(matchers))
    return found
