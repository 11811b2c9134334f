"""What others wrote cannot forge lines of our log."""

from __future__ import annotations

import logging

from gateway.plain_lines import PlainLines


def test_an_entry_is_one_line_whatever_it_quotes() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "stopped (%s)", ("x\nINFO forged\x00\u2028\ud800é",), None)
    assert PlainLines("%(levelname)s %(message)s").format(record) == (
        "INFO stopped (x\\x0aINFO forged\\x00\\x2028\\xd800é)"
    )


def test_a_traceback_keeps_its_lines() -> None:
    try:
        raise ValueError("a mistake")
    except ValueError as error:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "failed", None, (ValueError, error, error.__traceback__))
    assert PlainLines("%(message)s").format(record).splitlines()[0] == "failed"
    assert PlainLines("%(message)s").format(record).splitlines()[-1] == "ValueError: a mistake"
