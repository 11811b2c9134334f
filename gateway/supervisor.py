"""`--workers N`: starts the core and N hands, keeps them alive, and passes on what the operator says to all of them.

Each hand listens on a socket of its own at the same port (SO_REUSEPORT), made and kept open here: connections that
wait in the queue of a hand that died, or is replaced, are taken by its successor. Children are forked from this
process, which has everything imported and no event loop, so a successor is there within a tenth of a second. A child
beats once a second over a socket pair; one that stands still is killed, and one that reads the end of it has lost us
and leaves. SIGTERM drains, SIGHUP reads the configuration again (the core does), SIGUSR2 replaces this program by what
is installed now, hands one after the other, without closing the port.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway import children, folder
from gateway.cli import ONLY_CHECK
from gateway.config import Config
from gateway.server import CUT_S, listen

HANDED_OVER = "FOREBAY_HANDED_OVER"  # what a supervisor leaves to the program that replaces it
CHECK_S = 60.0  # the program that takes over may need so long to read its configuration
CORE = -1  # slot of the core
SOON_S = 0.5  # children that die sooner than this after their start are not restarted at once
log = logging.getLogger("forebay.supervisor")


@dataclass(slots=True, eq=False)
class Child:
    """`slot` -1: the core. `line` is our end of the socket pair."""

    slot: int
    pid: int
    line: socket.socket
    started_at: float
    beat_at: float
    retiring: bool = False

    @property
    def name(self) -> str:
        return "core" if self.slot == CORE else f"hand {self.slot}"


@dataclass
class Supervisor:
    config: Config
    path: Path | None
    overrides: Mapping[str, Any]
    sockets: list[socket.socket]
    greet: bool = True
    children: dict[int, Child] = field(default_factory=dict)
    old: dict[int, Child] = field(default_factory=dict)  # of the program before, leaving
    folders: tuple[str, ...] = ()  # of programs before
    _folder: str = ""
    _stopping_at: float | None = None
    _signals: list[int] = field(default_factory=list)
    _again: bool = False
    _due: dict[int, float] = field(default_factory=dict)  # slot -> when it is started again
    _wakers: tuple[socket.socket, ...] = ()
    _drain_s: float = 0.0

    def __post_init__(self) -> None:
        self._drain_s = self.config.listen.drain_s

    # -- life --------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until everything has ended; the exit status."""
        folder.sweep()
        self._folder = folder.make()
        here, there = self._wakers = socket.socketpair()
        here.setblocking(False)
        there.setblocking(False)
        signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD):
            signal.signal(sig, lambda number, frame: self._signals.append(number))
        try:
            self._start(CORE)
            for slot in range(len(self.sockets)):
                self._start(slot)
            while self.children or self.old:
                self._turn(here)
        finally:
            for made in (self._folder, *self.folders):
                shutil.rmtree(made, ignore_errors=True)
        return 0

    def _turn(self, woken: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(woken, selectors.EVENT_READ)
            for child in [*self.children.values(), *self.old.values()]:
                selector.register(child.line, selectors.EVENT_READ, child)
            for key, _ in selector.select(self._patience()):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        woken.recv(4096)
                else:
                    self._beat(key.data)
        while self._signals:
            self._signalled(self._signals.pop(0))
        self._reap()
        self._look(time.monotonic())

    def _patience(self) -> float:
        if not self._due:
            return 1.0
        return min(1.0, max(0.0, min(self._due.values()) - time.monotonic()))

    def _beat(self, child: Child) -> None:
        """A child lives; the core says with it how long a drain may take by the running configuration."""
        with contextlib.suppress(OSError):
            if said := child.line.recv(4096):
                child.beat_at = time.monotonic()
                if child.slot >= 0 and self.old:
                    self._retire_old(child.slot)
                elif child.slot == CORE:
                    with contextlib.suppress(ValueError):
                        self._drain_s = float(said.split()[-1])

    # -- children ----------------------------------------------------------------------------------------------------

    def _start(self, slot: int) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        pid = os.fork()
        if pid == 0:
            ours.close()
            for child in [*self.children.values(), *self.old.values()]:
                child.line.close()
            os._exit(self._child(slot, theirs))
        theirs.close()
        now = time.monotonic()
        self.children[pid] = Child(slot, pid, ours, now, now)

    def _child(self, slot: int, line: socket.socket) -> int:
        signal.set_wakeup_fd(-1)
        for waker in self._wakers:
            waker.close()
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD):
            signal.signal(sig, signal.SIG_DFL)
        os.environ.pop(HANDED_OVER, None)
        with contextlib.suppress(OSError):  # the name that ps -o comm and top show, where there is /proc
            Path("/proc/self/comm").write_text("forebay-core" if slot == CORE else f"forebay-hand-{slot}")
        try:
            if slot == CORE:
                address = self.sockets[0].getsockname()[:2] if self.greet and not self._again else None
                shown = self.sockets[0] if address is not None else None
                for sock in self.sockets:
                    if sock is not shown:
                        sock.close()
                children.core(self.config, self.path, self.overrides, self._link, line, self._again, shown)
            else:
                for other, sock in enumerate(self.sockets):
                    if other != slot:
                        sock.close()
                children.hand(self.config, slot, self._link, line, self.sockets[slot])
        except BaseException:
            log.exception("%s failed", "the core" if slot == CORE else f"hand {slot}")
            return 1
        return 0

    @property
    def _link(self) -> str:
        return f"{self._folder}/core"

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            of_before = pid in self.old
            child = self.old.pop(pid, None) or self.children.pop(pid, None)
            if child is None:
                continue
            if of_before and not self.old:
                log.info("replaced: the last process of the program before has left")
            child.line.close()
            if of_before or self._stopping_at is not None:
                continue  # the successor of one of the program before runs, or is started
            lived = time.monotonic() - child.started_at
            log.error("%s (pid %d) ended %s; starting another", child.name, pid, _how(status))
            self._again = self._again or child.slot == CORE
            self._due[child.slot] = time.monotonic() + (0.0 if lived > SOON_S else 1.0)

    def _look(self, now: float) -> None:
        """What time has brought: restarts that are due, children that stand still, the end of a drain."""
        for slot in [s for s, at in self._due.items() if at <= now]:
            del self._due[slot]
            if self._stopping_at is None:
                self._start(slot)
        hands = [c for c in self.children.values() if c.slot != CORE]
        if self._stopping_at is not None:
            if not hands and not self.old:
                self._tell(signal.SIGTERM, CORE)
            if now > self._stopping_at:
                self._tell(signal.SIGKILL)
        if self.old and not any(c.slot != CORE for c in self.old.values()):
            for child in self.old.values():  # the core of hands that are all gone
                _kill(child.pid, signal.SIGTERM)
        for child in self.children.values():
            if now - child.beat_at > self.config.workers.hang_s:
                log.error("%s (pid %d) stands still; killing it", child.name, child.pid)
                _kill(child.pid, signal.SIGKILL)
                child.beat_at = now

    # -- signals -----------------------------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            again = self._stopping_at is not None
            if not again:
                self._stopping_at = time.monotonic() + self._drain_s + CUT_S + 5.0
                log.info("stopping: open requests may finish; a second signal stops at once")
            for child in [*self.children.values(), *self.old.values()]:
                # to one of the program before, which leaves already, the first would be the second and cut its streams
                if child.slot != CORE and (again or not child.retiring):
                    _kill(child.pid, signal.SIGTERM)
        elif number == signal.SIGHUP:
            self._tell(signal.SIGHUP, CORE)
        elif number == signal.SIGUSR2 and self._stopping_at is None:
            self._replace()

    def _tell(self, number: int, slot: int | None = None) -> None:
        for child in self.children.values():
            if slot is None or child.slot == slot:
                _kill(child.pid, number)

    # -- another program in our place ----------------------------------------------------------------------

    def _replace(self) -> None:
        """Runs what is installed now in this process, with the port and the children; they leave once it is there."""
        again = [sys.executable, *sys.orig_argv[1:]]
        try:
            check = subprocess.run(
                again, env={**os.environ, ONLY_CHECK: "1"}, capture_output=True, text=True, timeout=CHECK_S
            )
        except (OSError, subprocess.SubprocessError) as e:  # no program there, or one that does not answer
            log.error("not replaced: %s", e)
            return
        if check.returncode:
            for line in (check.stdout + check.stderr).splitlines()[-5:]:
                log.error("not replaced: %s", line)
            return
        everyone = [*self.children.values(), *self.old.values()]
        rows = [(c.slot, c.pid, c.line.fileno()) for c in everyone]
        state = {
            "sockets": [s.fileno() for s in self.sockets],
            "children": rows,
            "retiring": [c.pid for c in everyone if c.retiring],
            "folders": [self._folder, *self.folders],
        }
        for kept in [*self.sockets, *(c.line for c in everyone)]:
            kept.set_inheritable(True)
        log.info("replacing the program; %d processes leave when their successors are there", len(rows))
        os.execve(sys.executable, again, {**os.environ, HANDED_OVER: json.dumps(state)})

    def _retire_old(self, slot: int) -> None:
        """The hand of this slot listens: the old one of the slot may go."""
        for child in self.old.values():
            if child.slot == slot and not child.retiring:
                child.retiring = True
                _kill(child.pid, signal.SIGUSR1)
        kept = {c.slot for c in self.children.values()}
        for child in self.old.values():  # there are fewer hands now
            if child.slot != CORE and child.slot >= len(kept) - 1 and not child.retiring:
                child.retiring = True
                _kill(child.pid, signal.SIGUSR1)


def supervise(config: Config, path: Path | None, overrides: Mapping[str, Any]) -> Callable[[], int]:
    """Takes over from a program before this one, or opens the port. Raises OSError when it cannot be had."""
    handed = json.loads(os.environ.pop(HANDED_OVER, "null"))
    wanted = config.workers.count
    sockets: list[socket.socket] = []
    old: dict[int, Child] = {}
    if handed is not None:
        now = time.monotonic()
        sockets = [socket.socket(fileno=fd) for fd in handed["sockets"]]
        retiring = handed.get("retiring", ())  # beside the rows, which an older program reads as well: one may go back
        for slot, pid, fd in handed["children"]:
            old[pid] = Child(slot, pid, socket.socket(fileno=fd), now, now, slot == CORE or pid in retiring)
        for sock in sockets:
            sock.set_inheritable(False)
    while len(sockets) < wanted:
        sockets.append(listen(config, sockets[0].getsockname()[1] if sockets else None))
    for extra in sockets[wanted:]:
        extra.close()
    made = Supervisor(config, path, overrides, sockets[:wanted], greet=handed is None, old=old)
    made.folders = () if handed is None else tuple(handed["folders"])
    return made.run


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"with status {os.waitstatus_to_exitcode(status)}"
