"""An ARM names one way to run: `NAME[+admission][+pacing]`.

`forebay` means everything on; every other bare name means immediate dispatch, because that is how the projects
the baselines come from use them; the suffixes add ours, to show what each part is worth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.settings import Settings

FULL = "forebay"
SWITCHES = ("admission", "pacing")


@dataclass(slots=True, frozen=True)
class Arm:
    text: str  # as written
    policy: str  # a name in policies.POLICIES
    settings: Settings


def parse(text: str, settings: Settings | None = None) -> Arm:
    """An arm with its switches set in a copy of `settings`. Raises ValueError for an unknown or doubled suffix."""
    name, *suffixes = text.strip().split("+")
    if not name:
        raise ValueError(f"arm {text!r} has no policy name; it should look like NAME[+admission][+pacing]")
    for suffix in suffixes:
        if suffix not in SWITCHES:
            raise ValueError(f"arm {text!r}: unknown suffix {suffix!r}; it should be one of {', '.join(SWITCHES)}")
        if suffixes.count(suffix) > 1:
            raise ValueError(f"arm {text!r}: suffix {suffix!r} is given twice")
    base = settings or Settings()
    everything = name == FULL and not suffixes
    return Arm(
        text,
        name,
        replace(
            base,
            admission=everything or "admission" in suffixes,
            pacing=everything or "pacing" in suffixes,
            working_set=everything and base.working_set,
        ),
    )
