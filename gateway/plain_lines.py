"""The log of the process: one entry a line, whatever clients and operators wrote into what is logged.

A name, a reason or a path may hold line ends and control characters; as they are, they would forge entries or make the
file binary. They are shown as \\x0a. Tracebacks keep their lines: they are ours.
"""

from __future__ import annotations

import logging
import re

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class PlainLines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return plain(super().formatMessage(record))


def plain(text: str) -> str:
    """`text` on one line, with control characters and lone surrogates shown by their number."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def begin() -> None:
    """Once, at the start of a process."""
    shown = logging.StreamHandler()
    shown.setFormatter(PlainLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[shown])
