"""The limit on open files: asked for at the start, and told apart from what is a replica's fault."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys

import pytest

from gateway import sockets

ASK = """
import resource
from gateway.sockets import ask_for_more
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(ask_for_more(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "told"), [(256, 900, "900 900 900"), (900, 900, "900 900 900")])
def test_a_process_takes_all_it_may_have(soft: int, hard: int, told: str) -> None:
    asked = [sys.executable, "-c", ASK.format(soft=soft, hard=hard)]
    assert subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout == f"{told}\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errno.EMFILE, "no connection to a replica: this process may open no more files: raise its limit"),
        (errno.EADDRNOTAVAIL, "no connection to a replica: this machine has no local port left for a replica"),
    ],
)
def test_what_is_short_here_is_said_once_in_a_while(
    error: int, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sockets, "_said_at", {})
    with caplog.at_level(logging.ERROR):
        assert [sockets.ours(OSError(error, "x")) for _ in range(3)] == [True] * 3
    assert [line.startswith(said) for line in caplog.messages] == [True]


@pytest.mark.parametrize("error", [errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ECONNRESET])
def test_what_a_replica_does_is_no_shortage(error: int) -> None:
    assert not sockets.ours(OSError(error, "x"))
