"""A process that may open no more files, which sockets are too."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_more_files(pid: int) -> Iterator[None]:
    """It keeps what it has open, also what is garbage already where it is this one."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        folder = f"/proc/{pid}/fd"
        listed = os.listdir(folder)  # what lists them is a file too, where they are our own
        taken = {int(name) for name in listed if os.path.lexists(f"{folder}/{name}")}
        first_free = next(n for n in range(1 << 20) if n not in taken)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_free, before[1]))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    finally:
        if collecting:
            gc.enable()
