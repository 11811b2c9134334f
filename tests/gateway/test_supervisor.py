"""The supervisor by itself: whom it signals when, and what it leaves to the program that replaces it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from subprocess import CompletedProcess

import pytest

from gateway import supervisor
from gateway.config import Config
from gateway.supervisor import Child, Supervisor


def test_a_program_that_is_not_there_leaves_the_one_that_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As while an installation is being replaced: the supervisor goes on, with what it had."""
    made = Supervisor(Config(), None, {}, [], greet=False)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    made._replace()
    assert "not replaced: [Errno 2] No such file or directory: '/nowhere/python'" in caplog.text


def test_a_stop_is_no_second_signal_to_those_that_leave_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the service is stopped just after an upgrade: what the old processes still stream goes on."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(supervisor, "_kill", lambda pid, number: sent.append((pid, number)))
    made = Supervisor(Config(), None, {}, [], greet=False)
    line, _ = socket.socketpair()
    core, new, old = Child(supervisor.CORE, 1, line, 0.0, 0.0), Child(0, 2, line, 0.0, 0.0), Child(0, 3, line, 0.0, 0.0)
    old.retiring = True
    made.children, made.old = {1: core, 2: new}, {3: old}
    made._signalled(signal.SIGTERM)
    assert sent == [(2, signal.SIGTERM)]
    made._signalled(signal.SIGTERM)  # now at once
    assert sent[1:] == [(2, signal.SIGTERM), (3, signal.SIGTERM)]


def test_a_stop_after_two_upgrades_in_a_row_is_none_to_those_of_the_first_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`exec` is where the third program would begin, which has to know who leaves already."""
    handed: dict[str, str] = {}

    def begun(path: str, argv: list[str], env: dict[str, str]) -> None:
        handed.update(env)

    monkeypatch.setattr(os, "execve", begun)
    monkeypatch.setattr(supervisor.subprocess, "run", lambda *args, **options: CompletedProcess([], 0, "", ""))
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(supervisor, "_kill", lambda pid, number: sent.append((pid, number)))
    lines = [socket.socketpair() for _ in range(3)]
    core, second, first = (Child(slot, 10 + n, lines[n][0], 0.0, 0.0) for n, slot in enumerate((supervisor.CORE, 0, 0)))
    first.retiring = True
    listening = socket.socket()
    made = Supervisor(Config(), None, {}, [listening], greet=False)
    made.children, made.old = {10: core, 11: second}, {12: first}
    made._replace()
    monkeypatch.setenv(supervisor.HANDED_OVER, handed[supervisor.HANDED_OVER])
    for kept in (listening, *(child.line for child in (core, second, first))):
        kept.detach()  # they are the next program's
    assert {len(row) for row in json.loads(handed[supervisor.HANDED_OVER])["children"]} == {3}  # what older ones read
    taken: Supervisor = supervisor.supervise(Config(), None, {}).__self__  # type: ignore[attr-defined]
    assert [(child.pid, child.retiring) for child in taken.old.values()] == [(10, True), (11, False), (12, True)]
    taken._retire_old(0)
    taken._signalled(signal.SIGTERM)
    assert sent == [(11, signal.SIGUSR1)]
    for kept in (*taken.sockets, *(child.line for child in taken.old.values()), *(theirs for _, theirs in lines)):
        kept.close()


def test_one_of_the_program_before_that_dies_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its successor has the slot, told to leave or not."""
    caplog.set_level("INFO", "forebay.supervisor")
    ended = [(3, signal.SIGKILL), (0, 0)]
    monkeypatch.setattr(os, "waitpid", lambda pid, options: ended.pop(0))
    made = Supervisor(Config(), None, {}, [], greet=False)
    line, _ = socket.socketpair()
    made.children, made.old = {2: Child(0, 2, line, 0.0, 0.0)}, {3: Child(0, 3, line, 0.0, 0.0)}
    made._reap()
    assert (made.old, list(made.children), made._due) == ({}, [2], {})
    assert caplog.messages == ["replaced: the last process of the program before has left"]
