"""The folder of the core's socket, and the removal of those that a killed supervisor left behind.

A supervisor removes its folder when it ends; after SIGKILL it cannot. So each folder holds a lock file that the
supervisor and its children keep locked: where nobody has the lock, nobody of that gateway lives any more, and the next
one to start removes the folder. A socket without a file (Linux's abstract names) would need no removal, but any user of
the host could connect to it, and the core tells its hands the keys of the replicas.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX, LOCK = "forebay-", "lock"


def make() -> str:
    """A new one, open to this user alone and locked by this process and all that it forks."""
    made = tempfile.mkdtemp(prefix=PREFIX)
    os.chmod(made, 0o700)
    lock = os.open(f"{made}/new", os.O_CREAT | os.O_RDWR, 0o600)  # never closed: held as long as we live
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(f"{made}/new", f"{made}/{LOCK}")  # who sees it by this name sees it locked
    return made


def sweep() -> None:
    """Removes what a supervisor left that was killed with SIGKILL, once none of its processes lives any more."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        try:
            if lock.lstat().st_uid != os.getuid():
                continue
            held = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            pass  # it is in use
        finally:
            os.close(held)
