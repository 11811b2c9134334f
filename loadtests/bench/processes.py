"""A server under measurement: started on one core, asked for its CPU time and memory, stopped again.

CPU time is utime + stime + cutime + cstime of /proc/PID/stat over the process and its living descendants, so that
workers and children count. Its resolution is one clock tick (10 ms): rounds have to be long against that. Memory is PSS
(shared pages counted once) over the same tree.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

SETPRIV = shutil.which("setpriv")  # of util-linux; where it is missing, a server may outlive a killed parent
ENDS_WITH_US = [SETPRIV, "--pdeathsig", "TERM", "--"] if SETPRIV else []
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class NotReadyError(RuntimeError):
    """A server died or did not answer in time; the text holds the end of its log."""


def two_cores() -> tuple[set[int], set[int]]:
    """(core of the load, core of the gateway); the same set twice on a machine with one core."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[0]}, {cores[1 % len(cores)]}


class Server:
    """A child process and its descendants, pinned to `cores`; output goes to `log`. It ends with us, however we end."""

    def __init__(
        self, argv: Sequence[str], log: Path, cores: set[int] | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        if ENDS_WITH_US and threading.current_thread() is threading.main_thread():  # "us" is the thread, for Linux
            argv = [*ENDS_WITH_US, *argv]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        if cores:
            os.sched_setaffinity(self.process.pid, cores)

    def wait_ready(self, url: str, within_s: float = 60.0) -> None:
        """Until `url` answers 200. Raises NotReadyError with the end of the log."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise NotReadyError(
                    f"{self.process.args!r} ended with status {self.process.returncode}:\n{self.log_tail()}"
                )
            try:
                with urllib.request.urlopen(url, timeout=2) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise NotReadyError(f"{url} was not ready within {within_s:g} s:\n{self.log_tail()}")

    def log_tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def tree(self) -> list[int]:
        return _tree(self.process.pid)

    def cpu_s(self) -> float:
        """CPU seconds that the process tree has used so far."""
        ticks = 0
        for pid in self.tree():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += sum(int(value) for value in fields[11:15])
        return ticks / TICKS_PER_S

    def memory_bytes(self) -> int:
        """PSS of the process tree."""
        total = 0
        for pid in self.tree():
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            total += next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
        return total

    def private_bytes(self) -> dict[str, int]:
        """Private memory (RssAnon) of each process, by what it calls itself."""
        found = {}
        for pid in self.tree():
            try:
                text = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            lines = dict(line.split(":", 1) for line in text.splitlines())
            found[f"{lines['Name'].strip()} ({pid})"] = int(lines.get("RssAnon", "0").split()[0]) * 1024
        return found

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def _tree(pid: int) -> list[int]:
    found = [pid]
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found += _tree(int(child))
    except OSError:
        pass  # it ended between two reads
    return found
