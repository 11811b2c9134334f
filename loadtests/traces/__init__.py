"""Readers of public request traces, one module per format, chosen by what the file looks like.

Every reader gives a `Source`: time from its first row, lengths in tokens, chained block ids (an equal id means an
equal prefix), and notes on what it had to change or invent. Bad lines are named by number, never skipped silently.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loadtests.schedule import ScheduleError
from loadtests.source import Generator, Source
from loadtests.traces import azure, bailian, burstgpt, journal, mooncake, servegen, sharegpt, weka
from loadtests.traces.file import Trace, open_trace

READERS: dict[str, tuple[Callable[[Trace], bool], Callable[[Trace], Source | Generator]]] = {
    "mooncake": (mooncake.recognises, mooncake.read),
    "bailian": (bailian.recognises, bailian.read),
    "weka": (weka.recognises, weka.read),
    "azure": (azure.recognises, azure.read),
    "burstgpt": (burstgpt.recognises, burstgpt.read),
    "servegen": (servegen.recognises, servegen.read),
    "journal": (journal.recognises, journal.read),
    "sharegpt": (sharegpt.recognises, sharegpt.read),
}


def read(path: Path, form: str | None = None) -> Source | Generator:
    """Read a trace (plain or .gz). `form` names the format; without it the file's first line decides.

    Raises ScheduleError naming the file, and the line or the formats known.
    """
    if form is not None and form not in READERS:
        raise ScheduleError(f"format {form!r} is not one of: {', '.join(READERS)}")
    trace = open_trace(path)
    for name, (recognises, reader) in READERS.items():
        if name == form or (form is None and recognises(trace)):
            return reader(trace)
    raise ScheduleError(f"{path}: its first line is none of the formats known: {', '.join(READERS)}")
